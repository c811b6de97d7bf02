"""The files of a folder: one for each page, whole, and those that are being written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Sequence
from typing import Final

from kvplug.transport import PageFolder

LAYOUT: Final = "v1"
"""Name of the folder inside; another one where a later version arranges the files in another way."""
_BLOCK: Final = 4096
"""Of the usual file systems. What a network file system says of its blocks is not what a file uses."""
NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
)
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MAX_BUFFERS: Final = 1024
"""Of one call of the system."""


def cost_of(nbytes: int) -> int:
    """Bytes that a file of ``nbytes`` uses on the disk."""
    return max(1, -(-nbytes // _BLOCK)) * _BLOCK


class Folder(PageFolder):
    """Files under keys. A page has its name only when it is whole.

    A page is written into a file aside, whose writer holds its lock, and then linked to its name, which fails
    if the name exists: the first whole page wins. A file aside whose lock is free is of a dead writer.
    """

    def __init__(self, path: str, *, sync: bool = False) -> None:
        super().__init__(path, LAYOUT, "options.fs.path")
        self.sync = sync
        self._links = True
        """Whether the file system has hard links, as far as is known."""

    # -- writing -------------------------------------------------------------------------------

    def new_file(self, nbytes: int) -> PageFile:
        """A file aside for a page of ``nbytes``.

        Raises:
            OSError: it cannot be made.
        """
        self.check_mounted()
        path = f"{self.aside}/{secrets.token_hex(16)}-{nbytes}"
        try:
            fd = os.open(path, _WRITE, 0o600)
        except FileNotFoundError:  # the folder is new, or was removed
            self.create()
            fd = os.open(path, _WRITE, 0o600)
        return PageFile(self, path, fd)

    def publish(self, file: PageFile, key: bytes) -> bool:
        """Whether the file is the page of the key now; false: another one was there first."""
        path = self.path_of(key)
        self.make_way(key)
        made = self._give_name(file.path, path)
        if made and self.sync:
            _sync_folder(os.path.dirname(path))
        return made

    def _give_name(self, aside: str, path: str) -> bool:
        if self._links:
            try:
                os.link(aside, path)
                return True
            except FileExistsError:
                return False
            except OSError as e:
                if e.errno not in NO_LINKS:
                    raise
                self._links = False
        return _rename_first(aside, path)


class PageFile:
    """A file aside. It is removed at the end of the block, whatever name it has by then."""

    def __init__(self, folder: Folder, path: str, fd: int) -> None:
        self._folder = folder
        self._fd = fd
        self.path = path
        with contextlib.suppress(OSError):  # a file system without locks: the file's age tells
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, page: Sequence[memoryview]) -> None:
        """Raises OSError: the page could not be written."""
        _write_all(self._fd, page)
        if self._folder.sync:
            os.fsync(self._fd)

    def remove(self) -> None:
        """Remove the file aside. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def is_abandoned(path: str) -> bool:
    """Whether no process is writing the file aside any more. False where that cannot be known."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _write_all(fd: int, page: Sequence[memoryview]) -> None:
    left = [part.cast("B") for part in page if part.nbytes]
    while left:
        written = os.writev(fd, left[:_MAX_BUFFERS])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def _rename_first(aside: str, path: str) -> bool:
    """Without hard links: look whether there is a page, and rename, one process at a time."""
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system that has no locks either: the last one wins
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.lexists(path):
            return False
        os.rename(aside, path)
        return True
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
