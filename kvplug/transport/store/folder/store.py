"""The base of stores that keep pages as files in a folder."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

from kvplug.errors import CapacityError
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.folder.files import PageFolder, cost_of
from kvplug.transport.store.folder.ledger import Ledger
from kvplug.transport.store.folder.sweeper import Sweeper
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.results import Usage

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_HEADER_BYTES: Final = (4096, 2 << 20)
"""How many bytes of a page to read to find its series: first enough for most headers, then for any."""


class FolderStore(BlockingStore):
    """Keeps each page in a file named after its key. All processes that use the folder share the pages.

    A page is written into a temporary file, which is then linked to the page's name. So a visible page is
    always complete, and a later write of the same key does not replace it. All processes share one budget:
    they evict the least recently used pages, and remove the temporary files of dead writers. A subclass that
    moves the bytes in its own way overrides :meth:`read_file` and :meth:`write_file`.
    """

    is_shared = True
    medium = "disk"

    def __init__(
        self,
        path: str,
        size: int,
        *,
        layout: str,
        option: str,
        num_threads: int = 4,
        sync: bool = False,
        touch_s: float = 1.0,
        rescan_s: float = 300.0,
    ) -> None:
        """
        Args:
            path: the path that the operator configured.
            size: how many bytes of the disk the pages may use, in whole blocks; the same in all processes.
            layout: the name of the folder inside ``path``, different for each arrangement of the files.
            option: the key of ``path`` in the config, for messages.
            num_threads: how many pages are read and written at the same time.
            sync: whether to wait for the disk after each page.
            touch_s: a read is recorded as a use if the last recorded use is at least this many seconds ago.
            rescan_s: seconds between searches of the folder for changes by other programs.

        Raises:
            ConfigError: ``path`` is not a folder, or other users can write to it.
        """
        self.num_threads = num_threads
        self._budget = size
        self._sync = sync
        self._touch_s = touch_s
        self._folder = PageFolder(path, layout, option, sync=sync)
        self.location = self._folder.path
        self._ledger = Ledger(os.path.join(self._folder.root, "usage"))
        self.sweeper = Sweeper(self._folder, self._ledger, size, rescan_s)
        """Counts what the folder uses, and evicts the least recently used pages."""

    # -- bytes ---------------------------------------------------------------------------------

    def read_file(self, fd: int, into: Sequence[memoryview]) -> int:
        """Fill the buffers, one after the other, from the file's beginning.

        Returns the number of bytes read, which is less than the buffers hold if the file is shorter.

        Raises:
            BlockingStore.PageError, OSError: the file cannot be read.
        """
        left = [buffer.cast("B") for buffer in into if buffer.nbytes]
        at = 0
        while left:
            count = os.preadv(fd, left, at)
            if not count:
                break
            at += count
            _skip(left, count)
        return at

    def write_file(self, fd: int, page: Sequence[memoryview]) -> None:
        """Write the bytes of the buffers, one after the other, into the empty file.

        Raises:
            OSError: the bytes cannot be written. ``ENOSPC`` or ``EDQUOT`` means that the disk is full.
        """
        left = [part.cast("B") for part in page if part.nbytes]
        while left:
            _skip(left, os.writev(fd, left))

    # -- pages ---------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._folder.has(keys)

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        fd = self._folder.open(key)
        if fd is None:
            return None
        try:
            status = os.fstat(fd)
            length = self.read_file(fd, into)
            if time.time() - status.st_mtime >= self._touch_s:
                self._folder.note_use((key,))
        finally:
            os.close(fd)
        wanted = sum(buffer.nbytes for buffer in into)
        # if the file became shorter meanwhile, the page is not complete
        return status.st_size if length == min(wanted, status.st_size) else length

    def touch(self, keys: Sequence[bytes]) -> None:
        self._folder.note_use(keys)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        """Write a page. See :meth:`BlockingStore.write`.

        Raises:
            CapacityError: the page is larger than the budget of the folder.
        """
        cost = cost_of(sum(part.nbytes for part in page))
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
        """Return true if the page exists now, false if the budget is full, ``None`` if the disk is full."""
        try:
            with self._folder.new_file(sum(part.nbytes for part in page)) as file:
                # after the file was created: a scan must be able to find whatever the ledger includes
                if not self.sweeper.reserve(file.path, cost):
                    return False
                made = False
                try:
                    self.write_file(file.fd, page)
                    if self._sync:
                        os.fsync(file.fd)
                    made = self._folder.publish(file, key)
                finally:
                    if not made:  # the write failed, or another writer was first
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


def _skip(buffers: list[memoryview], count: int) -> None:
    """Remove the first ``count`` bytes from the buffers."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]


def _series_of(path: str) -> bytes | None:
    """Return the series in a page's header, or ``None`` if the page has no header or is gone."""
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
