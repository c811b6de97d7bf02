"""The number of bytes and pages in a folder, shared by all processes that use it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Final

import attrs

from kvplug.transport.store.folder.files import PageFolder

_RECORD = struct.Struct("<8sqqqdI")
_MAX: Final = 1 << 60
"""A larger number means that the file is damaged."""
_MAGIC: Final = b"kvplugfs"
_PATIENCE_S: Final = 0.5
"""How long to wait for the lock before continuing without it. Its holder may be a stopped process."""
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


@attrs.define
class Totals:
    """The content of the ledger."""

    used_bytes: int = 0
    """Bytes of all pages, including those that are being written."""
    num_pages: int = 0
    added_bytes: int = 0
    """Bytes of all pages ever added. It only grows."""
    scanned_at: float = 0.0
    """When the folder was last scanned, in seconds since 1970; 0: never."""

    def encoded(self) -> bytes:
        """Return the totals as the bytes of the file."""
        values = self.used_bytes, self.num_pages, self.added_bytes, self.scanned_at
        return _RECORD.pack(_MAGIC, *values, zlib.crc32(repr(values).encode()))

    @classmethod
    def decoded(cls, record: bytes) -> Totals:
        """Return the totals in the bytes of the file; zeros if the file is damaged or new."""
        if len(record) == _RECORD.size:
            magic, *values, checksum = _RECORD.unpack(record)
            is_whole = magic == _MAGIC and checksum == zlib.crc32(repr(tuple(values)).encode())
            if is_whole and all(0 <= value < _MAX for value in values):
                return cls(*values)
        return cls()


class Ledger:
    """A file of a few bytes, which one process at a time changes.

    If a process is killed between changing the folder and changing the ledger, the two differ. A scan of the
    folder corrects the ledger.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.last = Totals()
        """The totals that this process read last."""

    @contextlib.contextmanager
    def change(self, first: Callable[[], object] = lambda: None) -> Iterator[Totals]:
        """Lock the file, yield the totals, and write them back after the ``with`` block has changed them.

        Args:
            first: called under the lock, before the totals are read. If it takes long, other processes stop
                waiting for the lock and change the totals without it. The totals include their changes.

        Raises:
            OSError: the file cannot be read or written, or ``first`` raised it. The totals are unchanged.
        """
        # Opened each time, so that a file that was replaced is noticed and a forked child inherits nothing.
        fd = PageFolder.open_own(self._path)
        try:
            locked = _lock(fd)
            try:
                first()
                totals = Totals.decoded(os.pread(fd, _RECORD.size, 0))
                yield totals
                os.pwrite(fd, totals.encoded(), 0)
                self.last = totals
            finally:
                if locked:  # explicitly, since a child that was forked meanwhile also holds the descriptor
                    fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def reserve(self, nbytes: int, budget: int) -> bool:
        """Count one more page of ``nbytes``, if the budget has room for it.

        Returns whether the page was counted. With a new ledger it is not: the folder must be scanned first.
        """
        with self.change() as totals:
            if not totals.scanned_at or totals.used_bytes + nbytes > budget:
                return False
            totals.used_bytes += nbytes
            totals.added_bytes += nbytes
            totals.num_pages += 1
            return True

    def release(self, nbytes: int, remove: Callable[[], None]) -> None:
        """Call ``remove`` and count one page less.

        Both happen under one lock. Otherwise a scan between them would not count the removed page, and this
        call would then subtract it a second time. After an error, ``remove`` is called once more without the
        ledger, which the next scan corrects.

        Raises:
            OSError: from ``remove``; the count is unchanged.
        """
        try:
            with self.change(remove) as totals:
                totals.used_bytes = max(0, totals.used_bytes - nbytes)
                totals.num_pages = max(0, totals.num_pages - 1)
        except OSError:  # from the ledger, or from the first call of remove()
            remove()

    def correct(self, before: Totals, used_bytes: int, num_pages: int) -> None:
        """Set the totals to the results of a scan. ``before``: the totals when the scan began.

        The scan may or may not have found a page that was added meanwhile. The bytes of such a page are added
        again, so that the true number of bytes never exceeds the counted one.
        """
        with self.change() as totals:
            added = totals.added_bytes - before.added_bytes
            totals.used_bytes = used_bytes + max(0, added)
            totals.num_pages = num_pages
            totals.scanned_at = time.time()


def _lock(fd: int) -> bool:
    limit = time.monotonic() + _PATIENCE_S
    pause = 0.0001
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > limit:
                return False
        except OSError as e:
            if e.errno in _NO_LOCKS:
                return False
            raise
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
