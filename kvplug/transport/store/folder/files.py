"""A folder with one file for each page. Only this user may use it, and its disk may be unmounted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from typing import Final

from kvplug.errors import ConfigError
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.results import MissReason

_KEY_BYTES: Final = 32
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OWN: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ABSENT: Final = (FileNotFoundError, NotADirectoryError)
_FOREIGN: Final = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO})
"""The errors for a link, a file or folder of another user, or a socket."""
_BLOCK: Final = 4096
"""Block size of common file systems. The one that a network file system reports is not what a file uses."""
NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
)


def cost_of(nbytes: int) -> int:
    """Return the bytes that a file of ``nbytes`` uses on the disk."""
    return max(1, -(-nbytes // _BLOCK)) * _BLOCK


class PageFolder:
    """Two levels of folders with the files of pages, and one folder for files that are still being written.

    Only regular files count as pages. Links, folders, pipes and sockets are neither followed nor opened. If
    one has the name of a page, a write of the page removes it, unless it is a folder with files.

    Raises (every method): OSError: the folder cannot be read, or its disk is no longer mounted.
    """

    def __init__(self, path: str, layout: str, option: str, *, sync: bool = False) -> None:
        """
        Args:
            path: the operator's path.
            layout: name of the folder inside ``path``, different for each arrangement of the files.
            option: the key of ``path`` in the config, for messages.
            sync: whether to wait for the disk when a page gets its name.

        Raises:
            ConfigError: ``path`` is not a folder, or others can write to it.
        """
        self.path = os.path.abspath(os.path.expanduser(path))
        """The operator's path, absolute."""
        self.root = os.path.join(self.path, layout)
        """The folder that contains the folders below and the store's own files."""
        self.pages = os.path.join(self.root, "pages")
        """The folder that contains the folders of pages."""
        self.aside = os.path.join(self.root, "writing")
        """The folder of files that will become pages."""
        self._option = option
        self._sync = sync
        self._links = True
        """Whether the file system has hard links; true until a link fails."""
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise ConfigError(f"{option}: {self.path} is not a folder")
        self._mount = "/"
        with contextlib.suppress(OSError):  # the disk may be read-only, or mounted later
            self.create()

    # -- the folders ---------------------------------------------------------------------------

    def create(self) -> None:
        """Make the folders, for this user only.

        Raises:
            ConfigError: one of them belongs to another user, or others can write to it.
        """
        self.check_mounted()
        _make_all(self.path)
        check_private(self.path, self._option, is_given=True)
        for folder in (self.root, self.pages, self.aside):
            _make(folder)
            self._check(folder)
        for entry in _entries(self.pages):
            if entry.is_dir(follow_symlinks=False):
                self._check(entry.path)
        mount = os.path.realpath(self.root)
        while not os.path.ismount(mount):
            mount = os.path.dirname(mount)
        self._mount = mount

    def _check(self, folder: str) -> None:
        check_private(folder, self._option)
        with contextlib.suppress(OSError):  # the disk may be read-only
            if stat.S_IMODE(os.lstat(folder).st_mode) & 0o055:
                os.chmod(folder, 0o700)  # headers contain prompts

    def check_mounted(self) -> None:
        """Raise OSError if the disk is no longer mounted."""
        if not os.path.ismount(self._mount):
            raise OSError(errno.ENODEV, "the disk is no longer mounted", self._mount)

    @staticmethod
    def open_own(path: str) -> int:
        """Open one of kvplug's own files for reading and writing, and create it if it is missing.

        Replaces anything else under its name: a link, a pipe, an empty folder, another user's file.
        """
        for _ in range(2):
            try:
                fd = os.open(path, _OWN, 0o600)
            except OSError as e:
                if e.errno not in _FOREIGN and not isinstance(e, IsADirectoryError):
                    raise
            else:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    return fd
                os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                (os.rmdir if stat.S_ISDIR(os.lstat(path).st_mode) else os.unlink)(path)
        return os.open(path, _OWN | os.O_EXCL, 0o600)

    # -- one page ------------------------------------------------------------------------------

    def path_of(self, key: bytes) -> str:
        """Return the path of the page with that key."""
        name = key.hex()
        return f"{self.pages}/{name[:2]}/{name[2:]}"

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a page that this user may read."""
        user = os.geteuid()
        found = [_is_readable_file(self.path_of(key), user) for key in keys]
        if not all(found):
            self.check_mounted()
        return found

    def is_page(self, key: bytes) -> bool:
        """Whether the key has a page that this user may read, in a folder that is not a link."""
        path = self.path_of(key)
        return _is_readable_file(path, os.geteuid()) and not _is_link(os.path.dirname(path))

    def open(self, key: bytes) -> int | None:
        """Open the page for reading, or return ``None`` if it is absent. Does not block on a pipe.

        Raises:
            BlockingStore.PageError: something under the page's name cannot be read.
        """
        path = self.path_of(key)
        try:
            if _is_link(os.path.dirname(path)):
                raise BlockingStore.PageError(MissReason.UNREADABLE, f"{os.path.dirname(path)} is a link")
            fd = os.open(path, _READ)
        except _ABSENT:
            self.check_mounted()
            return None
        except OSError as e:
            if e.errno in _FOREIGN:
                raise BlockingStore.PageError(MissReason.UNREADABLE, f"{path}: {e.strerror}") from e
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BlockingStore.PageError(MissReason.UNREADABLE, f"{path} is not a file")
        return fd

    def note_use(self, keys: Sequence[bytes]) -> None:
        """Mark these pages as used now. Ignores failures: pages may be evicted, or the folder read-only."""
        for key in keys:
            with contextlib.suppress(OSError):
                path = self.path_of(key)
                if not _is_link(os.path.dirname(path)):
                    os.utime(path, follow_symlinks=False)

    def make_way(self, key: bytes) -> None:
        """Make the page's folder, and remove anything under the page's name that is not a readable page.

        Raises:
            BlockingStore.PageError: something in the way cannot be removed.
        """
        path = self.path_of(key)
        folder = os.path.dirname(path)
        try:
            _make(folder)
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(folder).st_mode):
                    os.unlink(folder)
                    _make(folder)
                mode = os.lstat(path).st_mode
                if stat.S_ISDIR(mode):
                    os.rmdir(path)
                elif not self.is_page(key):
                    os.unlink(path)
        except (IsADirectoryError, PermissionError) as e:
            raise BlockingStore.PageError(
                MissReason.UNREADABLE, f"{e.filename} is in the way: {e.strerror}"
            ) from e
        except OSError as e:
            if e.errno != errno.ENOTEMPTY:
                raise
            raise BlockingStore.PageError(
                MissReason.UNREADABLE, f"{path} is a folder that is not empty"
            ) from e

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
        return PageFile(path, fd)

    def publish(self, file: PageFile, key: bytes) -> bool:
        """Give the file the name of the key's page. Returns false if the page exists already."""
        path = self.path_of(key)
        self.make_way(key)
        made = self._give_name(file.path, path)
        if made and self._sync:
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

    # -- all of them ---------------------------------------------------------------------------

    def all_pages(self) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
        """Yield all pages with their keys, in any order. May miss pages that come or go meanwhile."""
        for folder in _entries(self.pages):
            with contextlib.suppress(OSError):  # the folder belongs to another user, or is a circular link
                if folder.is_dir(follow_symlinks=False):
                    for entry in _entries(folder.path):
                        key = _key_named(folder.name + entry.name)
                        if key is not None and entry.is_file(follow_symlinks=False):
                            yield key, entry

    def written_aside(self) -> Iterator[tuple[os.DirEntry[str], int]]:
        """Yield files that are being written, or whose writers died, each with the size of its page."""
        for entry in _entries(self.aside):
            size = entry.name.rpartition("-")[2]
            if entry.is_file(follow_symlinks=False):
                yield entry, int(size) if size.isdecimal() else 0

    def remove_empty(self) -> bool:
        """Remove folders without pages, to free their inodes. Returns whether there were any."""
        found = False
        for folder in _entries(self.pages):
            with contextlib.suppress(OSError):
                os.rmdir(folder.path)
                found = True
        return found


class PageFile:
    """A temporary file. Its temporary name is removed at the end of the ``with`` block."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        """Its descriptor; -1 after :meth:`remove`."""
        with contextlib.suppress(OSError):  # a file system without locks: the file's age is used instead
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove the temporary file. Idempotent."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def check_private(folder: str, option: str, *, is_given: bool = False) -> None:
    """Check that no other user can put pages into a folder.

    Args:
        option: the key of the folder in the config, for messages.
        is_given: whether the operator named the folder, not kvplug. A given folder may belong to root, or be
            like ``/tmp``, where users cannot rename each other's folders.

    Raises:
        ConfigError: another user can put pages into the folder.
        OSError: the folder's status cannot be read.
    """
    status = os.stat(folder, follow_symlinks=is_given)
    what = f"{option}: the folder {folder}"
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{option}: {folder} is not a folder but, for example, a link: remove it")
    owners = {os.geteuid(), 0} if is_given else {os.geteuid()}
    if status.st_uid not in owners and status.st_uid != _own_id(folder):
        raise ConfigError(
            f"{what} belongs to another user (id {status.st_uid}), who can put pages there: name another"
            " folder, or remove this one"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022 and not (is_given and mode & stat.S_ISVTX):
        raise ConfigError(
            f"{what} can be written to by other users (its mode is {mode:04o}), who can put pages there:"
            f" check its content, then chmod 700 {folder}; or name another folder"
        )


def _own_id(folder: str) -> int:
    """Return this user's id on that disk, which may differ on a network file system."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()


def _is_readable_file(path: str, user: int) -> bool:
    try:
        status = os.lstat(path)
    except _ABSENT:
        return False
    except OSError as e:
        if e.errno in _FOREIGN:
            return False
        raise
    mode = status.st_mode
    if status.st_uid == user and mode & stat.S_IRUSR:  # true for most pages
        return stat.S_ISREG(mode)
    return stat.S_ISREG(mode) and os.access(path, os.R_OK)


def _is_link(path: str) -> bool:
    return stat.S_ISLNK(os.lstat(path).st_mode)


def _make(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)


def _make_all(folder: str) -> None:
    if not os.path.isdir(folder):
        _make_all(os.path.dirname(folder))
        _make(folder)


def _key_named(name: str) -> bytes | None:
    """Return the key whose page has that name, or ``None`` if a page cannot have it."""
    if len(name) != 2 * _KEY_BYTES:
        return None
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except _ABSENT:
        return


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


def _rename_first(aside: str, path: str) -> bool:
    """For disks without hard links: rename the file unless the page exists, one process at a time."""
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
