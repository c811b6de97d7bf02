"""The store "fs": pages as files in a folder."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

from kvplug import CapacityError
from kvplug.transport import BlockingStore, PageSeal, Usage
from kvplug_fs.folder import Folder, cost_of
from kvplug_fs.ledger import Ledger
from kvplug_fs.options import FolderOptions
from kvplug_fs.sweeper import Sweeper

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_HEADER_BYTES: Final = (4096, 2 << 20)
"""Bytes of a page to read for its series: enough for most headers, then for all."""


class FolderStore(BlockingStore):
    """Pages under keys, one file each, shared by every process that names the folder."""

    is_shared = True
    medium = "disk"

    def __init__(self, context: BlockingStore.Context) -> None:
        """Raises ConfigError: ``path`` is not a folder, or other users can write to it."""
        options: FolderOptions = context.options
        self.num_threads = options.threads
        self._budget = options.size
        self._touch_s = options.touch_s
        self._folder = Folder(options.path, sync=options.sync)
        self.location = self._folder.path
        self._ledger = Ledger(os.path.join(self._folder.root, "usage"))
        self.sweeper = Sweeper(self._folder, self._ledger, self._budget, options.rescan_s)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._folder.has(keys)

    # -- reading -------------------------------------------------------------------------------

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        fd = self._folder.open(key)
        if fd is None:
            return None
        try:
            status = os.fstat(fd)
            length = _read_all(fd, into)
            if time.time() - status.st_mtime >= self._touch_s:
                self._folder.note_use((key,))
        finally:
            os.close(fd)
        wanted = sum(map(len, into))
        # a file that became shorter is not a whole page
        return status.st_size if length == min(wanted, status.st_size) else length

    def touch(self, keys: Sequence[bytes]) -> None:
        self._folder.note_use(keys)

    # -- writing -------------------------------------------------------------------------------

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        cost = cost_of(sum(map(len, page)))
        if cost > self._budget:
            raise CapacityError(f"a page takes {cost} bytes on the disk, but the budget is {self._budget}")
        with _read_only_as_permission_error():
            if self._folder.is_page(key):
                return True
            self.sweeper.wait_until_counted()
            if (kept := self._write(key, page, cost)) is not None:
                return kept
            # the disk was full before the budget was used
            return self.sweeper.make_room_on_disk(2 * cost) and bool(self._write(key, page, cost))

    def _write(self, key: bytes, page: Sequence[memoryview], cost: int) -> bool | None:
        """Whether the page exists now; false: the budget has no room; ``None``: the disk is full."""
        try:
            with self._folder.new_file(sum(map(len, page))) as file:
                # counted only now: a scan that began before has found the file, or the page
                if not self.sweeper.reserve(file.path, cost):
                    return False
                made = False
                try:
                    file.write(page)
                    made = self._folder.publish(file, key)
                finally:
                    if not made:  # it failed, or another writer was first
                        self._ledger.release(cost, file.remove)
                return True
        except OSError as e:
            if e.errno not in _FULL:
                raise
            return None

    def remove(self, keys: Sequence[bytes]) -> None:
        with _read_only_as_permission_error():
            for key in keys:
                path = self._folder.path_of(key)
                if self._folder.is_page(key):
                    with contextlib.suppress(FileNotFoundError):
                        size = os.lstat(path).st_size
                        self._ledger.release(cost_of(size), functools.partial(os.unlink, path))

    # -- contents ------------------------------------------------------------------------------

    def keys(self, series: bytes) -> list[bytes]:
        return [key for key, entry in self._folder.all_pages() if _series_of(entry.path) == series]

    def usage(self) -> Usage:
        totals = self._ledger.last
        return Usage(
            num_pages=totals.num_pages,
            used_bytes=totals.used_bytes,
            budget_bytes=self._budget,
            num_evicted=self.sweeper.num_evicted,
        )

    def close(self) -> None:
        self.sweeper.close()


def _read_all(fd: int, into: Sequence[memoryview]) -> int:
    """Fill the buffers from the file's beginning. Returns the number of bytes read."""
    left = [buffer.cast("B") for buffer in into if buffer.nbytes]
    at = 0
    while left:
        count = os.preadv(fd, left, at)
        if not count:
            break
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return at


def _series_of(path: str) -> bytes | None:
    """The series in a page's header; ``None`` if there is none, or the page is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        for nbytes in _HEADER_BYTES:
            header = os.pread(fd, nbytes, 0)
            stated = PageSeal.split(header)
            if stated is not None:
                return stated[1]
            if len(header) < nbytes:
                break
        return None
    except OSError:
        return None
    finally:
        os.close(fd)


@contextlib.contextmanager
def _read_only_as_permission_error() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno == errno.EROFS:
            raise PermissionError(e.errno, e.strerror, e.filename) from e
        raise
