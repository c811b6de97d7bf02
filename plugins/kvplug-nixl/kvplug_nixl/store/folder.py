"""The files of a folder: one for each page, with its name only when it is whole, and the bytes they use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Final

import attrs

from kvplug.transport import PageFolder

_LAYOUT: Final = "nixl-v1"
"""Name of the folder inside; a later version that arranges the files in another way has another one."""
_RECORD: Final = struct.Struct("<8sqqI")
_MAGIC: Final = b"kvplugNX"
_BLOCK: Final = 4096
_PATIENCE_S: Final = 5.0
"""How long a process waits for another one that counts, or is stopped while it does."""
_ORPHAN_S: Final = 600.0
"""Age at which a file that is being written is of a dead writer."""


def cost_of(nbytes: int) -> int:
    """Bytes that a file of ``nbytes`` uses on the disk."""
    return max(1, -(-nbytes // _BLOCK)) * _BLOCK


@attrs.define
class Totals:
    """Of all pages in the folder, and those that are being written."""

    used_bytes: int = 0
    num_pages: int = 0

    def encoded(self) -> bytes:
        """The content of the file."""
        values = max(0, self.used_bytes), max(0, self.num_pages)
        return _RECORD.pack(_MAGIC, *values, zlib.crc32(repr(values).encode()))

    @classmethod
    def decoded(cls, record: bytes) -> Totals | None:
        """The inverse; ``None``: the file is damaged, or new."""
        if len(record) == _RECORD.size:
            magic, *values, checksum = _RECORD.unpack(record)
            is_whole = magic == _MAGIC and checksum == zlib.crc32(repr(tuple(values)).encode())
            if is_whole and all(0 <= value < 1 << 60 for value in values):
                return cls(*values)
        return None


@attrs.frozen(order=True)
class _Found:
    used_ns: int
    cost: int
    path: str


class Folder(PageFolder):
    """Files under keys, counted in one small file by all processes that share the folder.

    A writer that dies leaves a file aside, which is removed later, and may leave it counted until the budget
    is used up: then all files are counted anew, and the pages whose last use is longest ago are evicted.
    """

    def __init__(self, path: str, budget: int) -> None:
        super().__init__(path, _LAYOUT, "options.nixl.path")
        self._budget = budget
        self.last = Totals()
        """As this process has seen them last."""
        self.num_evicted = 0
        """By this process."""

    # -- writing -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def new_file(self, nbytes: int) -> Iterator[tuple[int, str] | None]:
        """A file aside, counted: its descriptor and its path. ``None``: the budget has no room for it.

        It is gone after the block, unless :meth:`publish` has made a page of it.

        Raises:
            OSError: it cannot be made.
        """
        self.check_mounted()
        path, cost = f"{self.aside}/{secrets.token_hex(16)}-{nbytes}", cost_of(nbytes)
        try:
            fd = self._reserve(path, cost)
        except FileNotFoundError:  # the folder is new, or was removed
            self.create()
            fd = self._reserve(path, cost)
        if fd is None:
            yield None
            return
        try:
            yield fd, path
        finally:
            os.close(fd)
            if os.path.lexists(path):
                self._forget(path, cost)

    def publish(self, path: str, key: bytes) -> None:
        """Make the file aside the page of the key, unless another one was there first."""
        to = self.path_of(key)
        try:
            self.make_way(key)
            os.link(path, to)
        except FileExistsError:
            return  # the file is removed, and counted out
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.rename(path, to)  # a file system without hard links: the last one wins
        else:
            os.unlink(path)

    # -- removing ------------------------------------------------------------------------------

    def remove(self, key: bytes) -> None:
        """Remove a page, if it is there."""
        path = self.path_of(key)
        if self.is_page(key):
            with contextlib.suppress(FileNotFoundError):
                self._forget(path, cost_of(os.lstat(path).st_size))

    def _forget(self, path: str, cost: int) -> None:
        """Remove a file and count it out, in one turn: else a count in between would do so again."""
        with self._turn() as totals:
            try:
                os.unlink(path)
            except FileNotFoundError:
                return  # it has become a page, or another process has removed it and counted it out
            if totals is not None:
                totals.used_bytes -= cost
                totals.num_pages -= 1

    # -- counting ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Totals | None]:
        """The totals, which may be changed in the block; one process and thread at a time.

        ``None``: another one has its turn, and does not end it.
        """
        fd = self.open_own(os.path.join(self.root, "usage"))
        try:
            if not _lock(fd):
                yield None
                return
            totals = Totals.decoded(os.pread(fd, _RECORD.size, 0))
            if totals is None:  # it is new or damaged
                found = self._count()
                totals = Totals(sum(each.cost for each in found), len(found))
            try:
                yield totals
            finally:
                os.pwrite(fd, totals.encoded(), 0)
                self.last = totals
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the descriptor as well
        finally:
            os.close(fd)

    def _reserve(self, path: str, cost: int) -> int | None:
        """Make a file aside and count it, in one turn: what is there is counted.

        Returns its descriptor; ``None``: there is no room for it.
        """
        fd = None
        try:
            with self._turn() as totals:
                if totals is None:
                    return None
                if totals.used_bytes + cost > self._budget:
                    found = self._count()
                    totals.used_bytes, totals.num_pages = sum(each.cost for each in found), len(found)
                    self._evict(found, totals, self._budget - self._budget // 16 - cost)
                if totals.used_bytes + cost > self._budget:
                    return None
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                totals.used_bytes += cost
                totals.num_pages += 1
        except OSError:
            if fd is not None:  # it could not be counted
                os.close(fd)
                os.unlink(path)
            raise
        return fd

    def make_room(self, nbytes: int) -> bool:
        """The disk is full before the budget is used. Returns whether any page was evicted."""
        with self._turn() as totals:
            before = self.num_evicted
            if totals is not None:
                self._evict(self._count(), totals, totals.used_bytes - nbytes)
            return self.remove_empty() or self.num_evicted > before

    def _evict(self, found: list[_Found], totals: Totals, goal: int) -> None:
        """The pages whose last use is longest ago, until no more than ``goal`` bytes are used."""
        for each in sorted(found):
            if totals.used_bytes <= goal:
                return
            if each.path.startswith(self.pages):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each.path)
                totals.used_bytes -= each.cost
                totals.num_pages -= 1
                self.num_evicted += 1

    def _count(self) -> list[_Found]:
        """All files. Those of dead writers are removed."""
        found, now = [], time.time()
        # aside first: a file that is no longer there afterwards is a page by then
        for entry, size in self.written_aside():
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if now - status.st_mtime > _ORPHAN_S:
                    os.unlink(entry.path)
                elif status.st_nlink == 1:
                    found.append(_Found(0, cost_of(size), entry.path))
        for _, entry in self.all_pages():
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.append(_Found(status.st_mtime_ns, cost_of(status.st_size), entry.path))
        return found


def _lock(fd: int) -> bool:
    limit = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > limit:
                return False
            time.sleep(0.001)
        except OSError:  # a file system without locks: what two count at once is corrected later
            return True
