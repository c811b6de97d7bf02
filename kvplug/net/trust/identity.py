"""Identifies processes exactly enough to watch for their death, and the user behind a Unix socket."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
from typing import Self

import attrs

from kvplug.errors import PeerGoneError, ResourceExhaustedError, WireError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_fd_after_fork, no_fork
from kvplug.net.peer_text import peer_text

IDENTITY_SIZE = 512
"""Size of an identity on the wire. Fixed, so that a peer cannot claim more memory."""
_MAX_TEXT = 96
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_UCRED = struct.Struct("iII")


def _short(text: str) -> str:
    """Make a text from a peer short and safe for messages."""
    return peer_text(text).encode("utf-8", "replace")[:_MAX_TEXT].decode("utf-8", "ignore")


@attrs.frozen(kw_only=True)
class PeerIdentity:
    """The identity of a process, unique among all processes that run or ran on its host.

    Each peer states its own. kvplug reads it only from a peer that has proved itself. A peer that states a
    wrong identity only prevents the detection of its own death.
    """

    boot_id: str = attrs.field(default="", converter=_short)
    """Boot id of the running kernel; equal on the same host. Empty if the platform does not provide one."""
    pid_ns: str = attrs.field(default="", converter=_short)
    """Pid namespace: pids are only meaningful among processes that share it."""
    net_ns: str = attrs.field(default="", converter=_short)
    """Network namespace: abstract sockets and loopback reach only processes that share it."""
    pid: int
    """Pid of the process in its pid namespace."""
    start_time: int = 0
    """Start time of the process in clock ticks since boot, to detect a reused pid. 0: unknown."""
    host: str = attrs.field(default="", converter=_short)
    """Host name, for messages."""
    label: str = attrs.field(default="", converter=_short)
    """The process's own name for itself ("prefill rank 0"), for messages."""

    @classmethod
    def of_this_process(cls, label: str = "") -> Self:
        """Return the identity of the calling process. ``label`` names it in messages at the other end.

        Raises:
            ResourceExhaustedError: the process has no free descriptor to read /proc.
        """
        pid = os.getpid()
        try:
            start_time = _start_time(pid)
        except OSError as e:
            NamedExhaustion.check(e, "reading the start time of this process")
            start_time = 0
        return cls(
            boot_id=boot_id(),
            pid_ns=namespace("pid"),
            net_ns=namespace("net"),
            pid=pid,
            start_time=start_time,
            host=socket.gethostname(),
            label=label,
        )

    def __str__(self) -> str:
        name = f"{self.label}, " if self.label else ""
        return f"{name}pid {self.pid}{f' on {self.host}' if self.host and not self._is_local() else ''}"

    def _is_local(self) -> bool:
        """As :attr:`same_host`, but safe in messages about a resource that ran out."""
        try:
            return self.same_host
        except ResourceExhaustedError:
            return False

    @property
    def same_host(self) -> bool:
        """Whether that process runs (or ran) on this host, under this boot of the kernel.

        Raises:
            ResourceExhaustedError: the process has no free descriptor to read the boot id.
        """
        return bool(self.boot_id) and self.boot_id == boot_id()

    @property
    def domain(self) -> str:
        """An opaque text: two processes with equal domains share abstract Unix sockets and loopback
        addresses.

        ``"-"`` if the platform does not provide it.
        """
        return f"{self.boot_id}/{self.net_ns}" if self.boot_id and self.net_ns else "-"

    @property
    def visible(self) -> bool:
        """Whether ``pid`` refers to that process here too: same host, same pid namespace.

        Raises:
            ResourceExhaustedError: as :attr:`same_host`.
        """
        return self.same_host and bool(self.pid_ns) and self.pid_ns == namespace("pid")

    def open_pidfd(self) -> int | None:
        """Open a descriptor that becomes readable when that process ends. The caller closes it.

        Returns ``None`` if a pidfd cannot be used: another host or pid namespace, an old kernel, a sandbox
        that forbids it. The start time is read *after* the descriptor is opened: if it matches, the
        descriptor belongs to the right process, whatever happens to the pid later.

        Raises:
            PeerGoneError: that process has already ended.
            ResourceExhaustedError: this process has no free descriptor.
        """
        if not self.visible or not self.start_time or not hasattr(os, "pidfd_open"):
            return None
        with contextlib.ExitStack() as undo:
            try:
                with no_fork:
                    pidfd = os.pidfd_open(self.pid)
                    close_fd_after_fork(pidfd)
                undo.callback(os.close, pidfd)
                start_time = _start_time(self.pid)
            except OSError as e:
                NamedExhaustion.check(e, f"watching {self}")
                is_missing = isinstance(e, FileNotFoundError) and os.path.isdir("/proc/self")
                if is_missing or isinstance(e, ProcessLookupError):
                    raise PeerGoneError(f"{self} has ended") from e
                return None
            if start_time != self.start_time:
                raise PeerGoneError(f"{self} has ended; its pid belongs to another process now")
            undo.pop_all()
        return pidfd


def encode_identity(identity: PeerIdentity) -> bytes:
    """Encode an identity as exactly ``IDENTITY_SIZE`` bytes."""
    import msgspec  # not needed by the probes of `kvplug list`, which describe this host

    packed = msgspec.msgpack.encode(identity)
    return (len(packed).to_bytes(2, "little") + packed).ljust(IDENTITY_SIZE, b"\0")


def decode_identity(message: bytes) -> PeerIdentity:
    """Invert :func:`encode_identity`.

    Raises:
        WireError: ``message`` is not an encoded identity.
    """
    import msgspec

    size = int.from_bytes(message[:2], "little")
    if len(message) != IDENTITY_SIZE or not 0 < size <= IDENTITY_SIZE - 2:
        raise WireError("an identity of the wrong size")
    try:
        identity = msgspec.msgpack.decode(message[2 : 2 + size], type=PeerIdentity)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as e:
        raise WireError(f"an identity that cannot be decoded: {peer_text(str(e))}") from e
    if not 0 < identity.pid < 2**31 or identity.start_time < 0:
        raise WireError(f"an identity with pid {identity.pid}, start time {identity.start_time}")
    return attrs.evolve(identity)  # msgspec does not run the converters, which make the texts fit messages


def _start_time(pid: int) -> int:
    with no_fork, open(f"/proc/{pid}/stat", "rb") as f:
        line = f.read()
    # The second field is the command in parentheses, which may itself contain spaces and parentheses.
    return int(line.rpartition(b")")[2].split()[19])


@functools.cache  # results are cached, exceptions are not
def boot_id() -> str:
    """Return the boot id of the running kernel, equal for all processes of one host. Empty if it is missing.

    Raises:
        ResourceExhaustedError: the process has no free descriptor to read the id.
    """
    return _read(_BOOT_ID).strip()


def namespace(kind: str) -> str:
    """Return the namespace (``"pid"``, ``"net"``) of this process. Empty if the kernel does not show it.

    Raises:
        ResourceExhaustedError: the host has no memory left to read it.
    """
    # Not cached: a process may move to another network namespace.
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError as e:
        NamedExhaustion.check(e, f"reading the namespace {kind!r}")
        return ""


def _read(path: str) -> str:
    """Read a file of /proc; return "" if it cannot be read. Raises ResourceExhaustedError."""
    try:
        with no_fork, open(path, encoding="utf-8") as f:
            return f.read()
    except OSError as e:
        NamedExhaustion.check(e, f"reading {path}")
        return ""


def unix_peer_uid(sock: socket.socket) -> int:
    """Return the effective uid of a Unix socket's peer: the process that connected, or that called
    ``listen``."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def same_user(uid: int) -> bool:
    """Whether ``uid``, as shown to us by the kernel, is the user that this process runs as.

    In a user namespace the kernel shows every user without a mapping as the overflow uid (65534, "nobody"). A
    process with that uid cannot distinguish such users, so the result is then False.

    Raises:
        ResourceExhaustedError: the process has no free descriptor to read /proc.
    """
    if uid != os.geteuid():
        return False
    overflow_uid = _read("/proc/sys/kernel/overflowuid")
    if not overflow_uid or int(overflow_uid) != uid:
        return True
    return _read("/proc/self/uid_map").split() == ["0", "0", str(2**32 - 1)]
