"""Unix sockets with a path in the file system, for processes that share a folder and no network namespace.

The file of a socket outlives a process that was killed. A server takes such a file over; one whose server is
alive it leaves alone. Servers of one folder do that one after the other, with a lock on the folder, which
leaves no file of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from typing import Final

import attrs

_LOCK_S: Final = 5.0
"""How long another server of the folder may take to bind."""
_PROBE_S: Final = 1.0


@attrs.frozen
class SocketFile:
    """The file of a bound socket."""

    path: str
    device: int
    inode: int

    @classmethod
    def at(cls, path: str) -> SocketFile:
        """Raises OSError: there is none."""
        found = os.lstat(path)
        return cls(path, found.st_dev, found.st_ino)

    def remove(self) -> None:
        """Remove the file, unless another server has taken it over. Never raises."""
        with contextlib.suppress(OSError), _locked(os.path.dirname(self.path)):
            if SocketFile.at(self.path) == self:
                os.unlink(self.path)


def bind_path(sock: socket.socket, path: str) -> None:
    """Bind the socket to ``path``, for this user only, and listen. Takes over the file of a dead server.

    Raises:
        OSError: EADDRINUSE: a server is alive there, or the file is no socket; or the folder cannot be used.
    """
    os.fchmod(sock.fileno(), 0o600)  # the mode of the file that bind makes
    with _locked(os.path.dirname(path)):
        try:
            sock.bind(path)
        except OSError as e:
            if e.errno != errno.EADDRINUSE or not _is_stale(path):
                raise
            os.unlink(path)
            sock.bind(path)
        sock.listen()  # with the lock: a socket that is bound and does not listen looks like a dead one


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError: it cannot be opened, or another process keeps the lock."""
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
    """Whether the file is a socket of which no process is the server any more."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
