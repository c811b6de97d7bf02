"""The identity of a process, exact enough to watch for its death; and the user behind a Unix socket."""

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
from kvplug.net.peer_text import peer_text

IDENTITY_SIZE = 512
"""Bytes of an identity on the wire: fixed, so that a peer cannot claim more memory."""
_MAX_TEXT = 96
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_UCRED = struct.Struct("iII")


def _short(text: str) -> str:
    """A peer states these, and they go into messages."""
    return peer_text(text).encode("utf-8", "replace")[:_MAX_TEXT].decode("utf-8", "ignore")


@attrs.frozen(kw_only=True)
class PeerIdentity:
    """The identity of a process, unique among all processes that run or ran on its host.

    A peer states it. kvplug reads it only from a peer that has proved itself, and a peer that states a wrong
    one prevents only the detection of its own death.
    """

    boot_id: str = attrs.field(default="", converter=_short)
    """Of the running kernel; equal means the same host. Empty where the platform has none."""
    pid_ns: str = attrs.field(default="", converter=_short)
    """Pid namespace: pids mean something only to processes that share it."""
    net_ns: str = attrs.field(default="", converter=_short)
    """Network namespace: abstract sockets and loopback reach only processes that share it."""
    pid: int
    """In its pid namespace."""
    start_time: int = 0
    """Clock ticks from boot to the start of the process; distinguishes a reused pid. 0: unknown."""
    host: str = attrs.field(default="", converter=_short)
    """Host name, for messages."""
    label: str = attrs.field(default="", converter=_short)
    """The name that the process gives itself ("prefill rank 0"), for messages."""

    @classmethod
    def of_this_process(cls, label: str = "") -> Self:
        """The calling process. ``label`` names it in messages at the other end.

        Raises:
            ResourceExhaustedError: it has no free descriptor to find out.
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
        """:attr:`same_host` for messages, also those about a resource that ran out."""
        try:
            return self.same_host
        except ResourceExhaustedError:
            return False

    @property
    def same_host(self) -> bool:
        """Whether that process runs (or ran) on this host, under this boot of the kernel.

        Raises:
            ResourceExhaustedError: the process has no free descriptor to find out.
        """
        return bool(self.boot_id) and self.boot_id == boot_id()

    @property
    def domain(self) -> str:
        """Opaque: two processes with equal domains share abstract Unix sockets and loopback addresses.

        It is ``"-"`` where the platform does not say.
        """
        return f"{self.boot_id}/{self.net_ns}" if self.boot_id and self.net_ns else "-"

    @property
    def visible(self) -> bool:
        """Whether ``pid`` means that process here too: same host, same pid namespace.

        Raises:
            ResourceExhaustedError: as :attr:`same_host`.
        """
        return self.same_host and bool(self.pid_ns) and self.pid_ns == namespace("pid")

    def open_pidfd(self) -> int | None:
        """A descriptor that becomes readable when that process ends; the caller closes it.

        ``None`` where its death cannot be seen that way: another host or pid namespace, an old kernel,
        a sandbox that forbids it. The start time is read *after* the descriptor is opened: if it is the
        right one then, the descriptor is of the right process, whatever happens to the pid later.

        Raises:
            PeerGoneError: that process has ended already.
            ResourceExhaustedError: this process has no free descriptor.
        """
        if not self.visible or not self.start_time or not hasattr(os, "pidfd_open"):
            return None
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as e:
            raise PeerGoneError(f"{self} has ended") from e
        except OSError as e:
            NamedExhaustion.check(e, f"watching {self}")
            return None
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, pidfd)
            try:
                start_time = _start_time(self.pid)
            except OSError as e:
                NamedExhaustion.check(e, f"watching {self}")
                is_missing = isinstance(e, FileNotFoundError | ProcessLookupError)
                if is_missing and os.path.isdir("/proc/self"):
                    raise PeerGoneError(f"{self} has ended") from e
                return None
            if start_time != self.start_time:
                raise PeerGoneError(f"{self} has ended; its pid belongs to another process now")
            undo.pop_all()
        return pidfd


def encode_identity(identity: PeerIdentity) -> bytes:
    """Exactly ``IDENTITY_SIZE`` bytes."""
    import msgspec  # not for the probes of `kvplug list`, which describe this host

    packed = msgspec.msgpack.encode(identity)
    return (len(packed).to_bytes(2, "little") + packed).ljust(IDENTITY_SIZE, b"\0")


def decode_identity(message: bytes) -> PeerIdentity:
    """The inverse of :func:`encode_identity`.

    Raises:
        WireError: it is anything else.
    """
    import msgspec

    size = int.from_bytes(message[:2], "little")
    if len(message) != IDENTITY_SIZE or not 0 < size <= IDENTITY_SIZE - 2:
        raise WireError("an identity of the wrong size")
    try:
        identity = msgspec.msgpack.decode(message[2 : 2 + size], type=PeerIdentity)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as e:
        raise WireError(f"an identity that cannot be read: {peer_text(str(e))}") from e
    if not 0 < identity.pid < 2**31 or identity.start_time < 0:
        raise WireError(f"an identity with pid {identity.pid}, start time {identity.start_time}")
    return attrs.evolve(identity)  # msgspec does not call the converters, which make the texts fit messages


def _start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as f:
        line = f.read()
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    return int(line.rpartition(b")")[2].split()[19])


@functools.cache  # of what it returns; what it raises is not kept
def boot_id() -> str:
    """Of the running kernel: two processes with equal ones are on one host. Empty where there is none.

    Raises:
        ResourceExhaustedError: the process has no free descriptor to read it.
    """
    return _read(_BOOT_ID).strip()


def namespace(kind: str) -> str:
    """The namespace (``"pid"``, ``"net"``) of this process. Empty where the kernel does not show it.

    Raises:
        ResourceExhaustedError: the host has no memory left to say it.
    """
    # Not cached: a process may move to another network namespace.
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError as e:
        NamedExhaustion.check(e, f"reading the namespace {kind!r}")
        return ""


def _read(path: str) -> str:
    """A file of /proc; empty where there is none. Raises ResourceExhaustedError."""
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except OSError as e:
        NamedExhaustion.check(e, f"reading {path}")
        return ""


def unix_peer_uid(sock: socket.socket) -> int:
    """Effective uid of the process that connected, or that called ``listen``, at a Unix socket."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def same_user(uid: int) -> bool:
    """Whether ``uid``, as the kernel showed it to us, is the user this process runs as.

    In a user namespace the kernel shows every user without a mapping as the overflow uid (65534, "nobody").
    A process that itself has that uid cannot distinguish such users and gets False.

    Raises:
        ResourceExhaustedError: the process has no free descriptor to find out.
    """
    if uid != os.geteuid():
        return False
    overflow_uid = _read("/proc/sys/kernel/overflowuid")
    if not overflow_uid or int(overflow_uid) != uid:
        return True
    return _read("/proc/self/uid_map").split() == ["0", "0", str(2**32 - 1)]
