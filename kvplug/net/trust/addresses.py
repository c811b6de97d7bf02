"""Binds a listener's socket to an address of this host.

The file of a Unix socket outlives a killed process. A new server takes over such a file unless the server
that made it is alive. A lock on the folder, which leaves no file behind, makes servers in one folder take
turns.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import attrs

from kvplug.config.addresses import Address, ip_address
from kvplug.errors import AddressInUseError, ConfigError, PeerGoneError, TransportError
from kvplug.net.fork import close_after_fork, close_sockets, no_fork

_BACKLOG: Final = 128
_LOCK_S: Final = 5.0
"""How long another server in the folder may take to bind."""
_LISTEN: Final = "0A"  # in /proc/net/tcp


# -- binding ----------------------------------------------------------------------------------------


@attrs.frozen
class BoundSocket:
    """A listening socket."""

    sock: socket.socket
    address: Address
    """The address that others dial."""
    _remove_file: Callable[[], None] = lambda: None

    @classmethod
    def listen(cls, address: Address) -> Self:
        """Listen at an address of this host.

        Raises:
            ConfigError, AddressInUseError, TransportError: as
                :meth:`kvplug.net.trust.listener.Listener.open`.
        """
        sockaddr: Any
        if not address.is_unix:
            try:
                family, sockaddr = address.resolve()[0]
            except PeerGoneError as e:
                raise ConfigError(f"cannot listen at {address}: {e}") from e
        else:
            # A generated name cannot be guessed, and contains the user id.
            address = Address(name=address.name or f"kvplug-{os.geteuid()}-{secrets.token_hex(12)}")
            family, sockaddr = socket.AF_UNIX, address.sockaddr
        try:
            with no_fork:
                sock = socket.socket(family, socket.SOCK_STREAM)
                close_after_fork(sock)
            try:
                if address.is_unix and address.is_path:
                    return cls(sock, address, _bind_path(sock, address.name))
                if not address.is_unix:
                    # This only allows a port whose old connections linger; two listeners still collide.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(sockaddr)
                sock.listen(_BACKLOG)
                return cls(sock, address if address.is_unix else _contact(sock))
            except BaseException:
                close_sockets(sock)
                raise
        except OSError as e:
            raise _cannot_bind(address, e) from e

    def shut_down(self) -> None:
        """Remove the socket's file if it still belongs to this socket, and make connections to the socket
        fail, even if a forked child still holds it. Wakes a thread that polls it. Idempotent."""
        if self.sock.fileno() >= 0:
            self._remove_file()
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


def _cannot_bind(address: Address, e: OSError) -> Exception:
    if e.errno == errno.EADDRINUSE:
        owner = _owner_of(address)
        by = f" by {owner}" if owner else ""
        return AddressInUseError(f"{address} is in use{by}; stop it or choose another address")
    if e.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"cannot listen at {address}: this host has no such address")
    if e.errno in (errno.ENOENT, errno.ENOTDIR) and address.is_unix:
        return ConfigError(f"cannot listen at {address}: there is no such folder")
    return TransportError(f"cannot listen at {address}: {e.strerror or e}")


def _contact(sock: socket.socket) -> Address:
    host, port, *more = sock.getsockname()
    if ip_address(host).is_unspecified:
        host = _own_address(sock.family)
    elif len(more) == 2 and more[1] and "%" not in host:
        # Use the interface's name: other hosts' interfaces to the link more often share the name than the
        # number.
        host = f"{host}%{socket.if_indextoname(more[1])}"
    return Address(host, port)


def _own_address(family: int) -> str:
    """Return an address that other hosts can dial, for a listener on all interfaces: that of the default
    route."""
    with contextlib.suppress(OSError), no_fork, socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing, but makes the kernel choose a source address.
        probe.connect(("192.0.2.1", 9) if family == socket.AF_INET else ("2001:db8::1", 9))
        return str(probe.getsockname()[0])
    return socket.gethostname()


# -- Unix sockets in the file system ---------------------------------------------------------------------


def _bind_path(sock: socket.socket, path: str) -> Callable[[], None]:
    """Bind the socket to ``path``, for this user only, and listen. Takes over the file of a dead server.

    Returns a function that removes the file unless another server has taken it over. It never raises.
    """
    os.fchmod(sock.fileno(), 0o600)  # the mode of the file that bind makes
    folder = os.path.dirname(path)
    with _locked(folder):
        try:
            sock.bind(path)
        except OSError as e:
            if e.errno != errno.EADDRINUSE or not _is_stale(path):
                raise
            os.unlink(path)
            sock.bind(path)
        sock.listen(_BACKLOG)  # under the lock: a bound socket that does not listen yet looks dead
        ours = os.lstat(path)

    def remove() -> None:
        with contextlib.suppress(OSError), _locked(folder):
            if os.path.samestat(os.lstat(path), ours):
                os.unlink(path)

    return remove


def remove_stale(path: str) -> None:
    """Remove the file of a socket without a server. Raises OSError."""
    with _locked(os.path.dirname(path)), contextlib.suppress(FileNotFoundError):
        if _is_stale(path):
            os.unlink(path)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError: the folder cannot be opened, or another process keeps the
    lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        limit = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise OSError(errno.EBUSY, f"another process keeps the folder {folder} locked") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _is_stale(path: str) -> bool:
    """Whether the file is a socket without a server."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with no_fork, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # if the server's backlog is full, it is alive
        return probe.connect_ex(path) == errno.ECONNREFUSED


# -- which process listens, for messages -----------------------------------------------------------------


def _owner_of(address: Address) -> str:
    """Return "pid 12 (name)" of the process that listens at ``address``, or ``""`` if /proc does not show
    it."""
    wanted = {f"socket:[{inode}]" for inode in _inodes(address)}
    for link in glob.iglob("/proc/[0-9]*/fd/*") if wanted else ():
        with contextlib.suppress(OSError):  # already closed, or another user's
            if os.readlink(link) in wanted:
                pid = link.split("/")[2]
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as f:
                    return f"pid {pid} ({f.read().strip()})"
    return ""


def _inodes(address: Address) -> Iterator[str]:
    """Yield the inodes of the sockets that listen at ``address``, from the kernel's socket tables."""
    for table in ("unix",) if address.is_unix else ("tcp", "tcp6"):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/net/{table}", encoding="utf-8", errors="replace") as f,
        ):
            for fields in map(str.split, f):
                if not address.is_unix:
                    if fields[3] == _LISTEN and fields[1].endswith(f":{address.port:04X}"):
                        yield fields[9]
                elif fields[-1] == (address.name if address.is_path else f"@{address.name}"):
                    yield fields[6]
