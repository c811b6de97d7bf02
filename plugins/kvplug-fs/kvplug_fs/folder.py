"""The files of a folder: one for each page, whole, and those that are being written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Final

KEY_BYTES: Final = 32
LAYOUT: Final = "v1"
"""Name of the folder inside; another one where a later version arranges the files in another way."""
_PAGES: Final = "pages"
_ASIDE: Final = "writing"
_BLOCK: Final = 4096
"""Of the usual file systems. What a network file system says of its blocks is not what a file uses."""
_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
)
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MAX_BUFFERS: Final = 1024
"""Of one call of the system."""


def cost_of(nbytes: int) -> int:
    """Bytes that a file of ``nbytes`` uses on the disk."""
    return max(1, -(-nbytes // _BLOCK)) * _BLOCK


class Folder:
    """Files under keys. A page has its name only when it is whole.

    A page is written into a file aside, whose writer holds its lock, and then linked to its name, which fails
    if the name exists: the first whole page wins. A file aside whose lock is free is of a dead writer.
    """

    def __init__(self, path: str, *, sync: bool = False) -> None:
        self.root = os.path.join(path, LAYOUT)
        self._pages = os.path.join(self.root, _PAGES)
        self._aside = os.path.join(self.root, _ASIDE)
        self.sync = sync
        self._links = True
        """Whether the file system has hard links, as far as is known."""

    def create(self) -> None:
        """Make the folders.

        Raises:
            OSError: they cannot be made.
        """
        os.makedirs(os.path.dirname(self.root), exist_ok=True)
        for path in (self.root, self._pages, self._aside):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)

    def path_of(self, key: bytes) -> str:
        """Where the page of that key is."""
        name = key.hex()
        return f"{self._pages}/{name[:2]}/{name[2:]}"

    def has(self, key: bytes) -> bool:
        """Whether there is a page.

        Raises:
            OSError: the folder cannot be searched.
        """
        try:
            os.stat(self.path_of(key))
        except FileNotFoundError:
            return False
        return True

    def open(self, key: bytes) -> int | None:
        """A descriptor to read the page from; ``None``: there is none."""
        try:
            return os.open(self.path_of(key), _READ)
        except FileNotFoundError:
            return None

    # -- writing -------------------------------------------------------------------------------

    def new_file(self, nbytes: int) -> PageFile:
        """A file aside for a page of ``nbytes``.

        Raises:
            OSError: it cannot be made.
        """
        path = f"{self._aside}/{secrets.token_hex(16)}-{nbytes}"
        try:
            fd = os.open(path, _WRITE, 0o600)
        except FileNotFoundError:  # the folder is new, or was removed
            self.create()
            fd = os.open(path, _WRITE, 0o600)
        return PageFile(self, path, fd)

    def publish(self, file: PageFile, key: bytes) -> bool:
        """Whether the file is the page of the key now; false: another one was there first."""
        path = self.path_of(key)
        try:
            made = self._give_name(file.path, path)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
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
                if e.errno not in _NO_LINKS:
                    raise
                self._links = False
        return _rename_first(aside, path)

    # -- all of them ---------------------------------------------------------------------------

    def pages(self) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
        """All pages with their keys, in no particular order. Those that come or go meanwhile may be missing.

        Raises:
            OSError: a folder cannot be read.
        """
        for folder in _entries(self._pages):
            for entry in _entries(folder.path):
                key = _key_named(folder.name + entry.name)
                if key is not None:
                    yield key, entry

    def written_aside(self) -> Iterator[tuple[os.DirEntry[str], int]]:
        """Files that are being written, or were when their writers died, each with the size of its page."""
        for entry in _entries(self._aside):
            size = entry.name.rpartition("-")[2]
            yield entry, int(size) if size.isdecimal() else 0


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
        fd = os.open(path, _READ)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _key_named(name: str) -> bytes | None:
    """The key whose page has that name; ``None``: the file is no page."""
    if len(name) != 2 * KEY_BYTES:
        return None
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return


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
