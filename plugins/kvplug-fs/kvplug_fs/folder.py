"""The files of a folder: one for each complete page, and the files that are being written."""

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
"""Name of the inner folder. A version that arranges the files differently uses another name."""
_BLOCK: Final = 4096
"""Block size of common file systems. A network file system's block size is not what a file uses."""
NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
)
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MAX_BUFFERS: Final = 1024
"""Limit of one system call."""


def cost_of(nbytes: int) -> int:
    """Bytes that a file of ``nbytes`` uses on the disk."""
    return max(1, -(-nbytes // _BLOCK)) * _BLOCK


class Folder(PageFolder):
    """Files under keys. A page has its name only when it is whole.

    A page is written into a temporary file, which its writer locks, and then linked to its name. Linking
    fails if the name exists: the first whole page wins. An unlocked temporary file has a dead writer.
    """

    def __init__(self, path: str, *, sync: bool = False) -> None:
        super().__init__(path, LAYOUT, "options.fs.path")
        self.sync = sync
        self._links = True
        """Whether the file system has hard links; true until a link fails."""

    # -- writing -------------------------------------------------------------------------------

    def new_file(self, nbytes: int) -> PageFile:
        """Create a temporary file for a page of ``nbytes``.

        Raises:
            OSError: it cannot be created.
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
        """Give the file the name of the key's page. Returns false if the page exists already."""
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
    """A temporary file. Its temporary name is removed at the end of the block."""

    def __init__(self, folder: Folder, path: str, fd: int) -> None:
        self._folder = folder
        self._fd = fd
        self.path = path
        with contextlib.suppress(OSError):  # a file system without locks: the file's age is used instead
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, page: Sequence[memoryview]) -> None:
        """Raises OSError: the page could not be written."""
        _write_all(self._fd, page)
        if self._folder.sync:
            os.fsync(self._fd)

    def remove(self) -> None:
        """Remove the temporary file. Idempotent."""
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
    """Whether no process writes the temporary file any more. False if that cannot be determined."""
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
    """Without hard links: rename the file unless the page exists, one process at a time."""
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks as well: the last writer wins
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
