"""Keeps a folder within its budget: scans it, evicts the least recently used pages, and cleans up."""

from __future__ import annotations

import contextlib
import functools
import heapq
import logging
import os
import threading
import time
from collections import deque
from typing import Final

import attrs

from kvplug.net.threads import BackgroundThread
from kvplug.transport.store.folder.files import PageFolder, cost_of, is_abandoned
from kvplug.transport.store.folder.ledger import Ledger

_log = logging.getLogger(__name__)

_MAX_CANDIDATES: Final = 4096
"""How many pages one scan proposes for eviction."""
_CLOSE_S: Final = 5.0
ASIDE_S: Final = 10.0
"""Minimum age of a temporary file before its lock is checked, since its writer locks it after creation."""
_ASIDE_WITHOUT_LOCKS_S: Final = 3600.0
"""The writer of a temporary file older than this counts as dead, even if the file is still locked."""


@attrs.frozen(order=True)
class _Candidate:
    used_ns: int
    """The last recorded use of the page."""
    size: int = attrs.field(order=False)
    path: str = attrs.field(order=False)


class Sweeper:
    """Makes room for the pages that this process adds. Each process that uses the folder has one."""

    def __init__(self, folder: PageFolder, ledger: Ledger, budget: int, rescan_s: float) -> None:
        self._folder = folder
        self._ledger = ledger
        self._budget = budget
        self._rescan_s = rescan_s
        self._lock = threading.Lock()
        """Held while pages are evicted."""
        self.num_evicted = 0
        """Pages that this process evicted."""
        self._candidates: deque[_Candidate] = deque()
        self._few = 0
        """How many candidates are left when the next scan begins, so that writers do not wait for it."""
        self._counted = threading.Event()
        """Set once the ledger includes the pages that were in the folder at the start."""
        self._closed = threading.Event()
        self._is_wanted = threading.Event()
        """Set if a scan is to begin now, or the sweeper is closed."""
        self._thread = BackgroundThread(self._work, name="kvplug-folder-scan", stop=self._stop)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that scans. Idempotent."""
        self._stop()
        self._thread.join(_CLOSE_S)  # a disk that does not answer blocks the thread

    def _stop(self) -> None:
        self._closed.set()
        self._counted.set()
        self._is_wanted.set()

    # -- room ----------------------------------------------------------------------------------

    def wait_until_counted(self) -> None:
        """Wait until the ledger includes the existing pages. Returns at once unless the ledger is new."""
        self._counted.wait()

    def reserve(self, path: str, nbytes: int) -> bool:
        """Reserve ``nbytes`` for a page. ``path`` is its temporary file. Returns whether there is room.

        Raises:
            OSError: the folder cannot be written to.
        """
        if self._ledger.reserve(nbytes, self._budget):
            return True
        with self._lock:
            last = self._ledger.last
            scanned = not last.scanned_at or last.used_bytes > self._budget
            if scanned:  # the ledger is new, or its total exceeds the budget
                self.scan(without=path)
            while not self._ledger.reserve(nbytes, self._budget):
                if self._evict_one():
                    scanned = False  # once the candidates run out, another scan may find more
                elif scanned:
                    return False
                else:
                    self.scan(without=path)
                    scanned = True
            return True

    def make_room_on_disk(self, nbytes: int) -> bool:
        """Evict ``nbytes``: the disk became full before the budget did. Returns whether that freed any."""
        evicted = 0
        with self._lock:
            for scan_first in (False, True):
                if scan_first:
                    self.scan()
                while evicted < nbytes and (size := self._evict_one()):
                    evicted += size
        return self._folder.remove_empty() or evicted > 0

    def _evict_one(self) -> int:
        """Evict a page. The caller holds the lock. Returns the page's bytes, or 0 if no candidate is left."""
        candidates = self._candidates  # a scan may replace them
        while candidates and not self._closed.is_set():
            oldest = candidates.popleft()
            if len(candidates) == self._few:
                self._is_wanted.set()
            try:
                if os.lstat(oldest.path).st_mtime_ns != oldest.used_ns:
                    continue  # it was used after the scan
                cost = cost_of(oldest.size)
                self._ledger.release(cost, functools.partial(os.unlink, oldest.path))
            except FileNotFoundError:
                continue  # another process evicted and counted it
            self.num_evicted += 1
            return cost
        return 0

    # -- scans ---------------------------------------------------------------------------------

    def _work(self) -> None:
        wait_s = 0.0
        try:
            with self._ledger.change() as totals:
                last = totals.scanned_at
            if last:
                self._counted.set()
                wait_s = min(max(0.0, last + self._rescan_s - time.time()), self._rescan_s)
        except OSError:
            self._counted.set()  # nothing can be added to a read-only folder
        while True:
            is_wanted = self._is_wanted.wait(wait_s)
            self._is_wanted.clear()  # before the look at what close sets first
            if self._closed.is_set():
                return
            wait_s = self._rescan_s
            try:
                if self._is_due():
                    self.scan_now()
                elif is_wanted:
                    self._search("")  # the ledger is right: pages that are added meanwhile would count twice
            except OSError as e:
                _log.debug("the folder %s cannot be searched: %s", self._folder.root, e)
            finally:
                self._counted.set()

    def _is_due(self) -> bool:
        """Whether no other process has searched the folder lately."""
        with self._ledger.change() as totals:
            return not 0 <= time.time() - totals.scanned_at < 0.5 * self._rescan_s

    def scan_now(self) -> None:
        """Search the folder, and evict pages until it is within the budget.

        Raises:
            OSError: the folder cannot be read.
        """
        self.scan()  # without the lock: a scan may take long, and writers must be able to evict meanwhile
        with self._lock:
            while self._ledger.last.used_bytes > self._budget and self._evict_one():
                pass

    def scan(self, without: str = "") -> None:
        """Count all pages, find the least recently used ones, and clean up.

        Temporary files are counted before pages. A temporary file that becomes a page during the scan is then
        never missed. So the scan finds everything that the ledger includes, except for later additions.

        Args:
            without: a temporary file to ignore, since the ledger does not include it yet.

        Raises:
            OSError: the folder cannot be read.
        """
        with self._ledger.change() as totals:
            before = attrs.evolve(totals)
        if (found := self._search(without)) is not None:
            self._ledger.correct(before, found.used_bytes, found.num_pages)

    def _search(self, without: str) -> _ScanResult | None:
        """Find all pages, make the least recently used ones candidates, and clean up. Returns ``None`` if the
        sweeper is closed meanwhile."""
        found = _ScanResult()
        self._scan_temporary(found, without)
        for _, entry in self._folder.all_pages():
            if self._closed.is_set():
                return None
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.add(_Candidate(status.st_mtime_ns, status.st_size, entry.path))
        candidates = deque(found.oldest())
        self._few = len(candidates) // 4
        self._candidates = candidates
        return found

    def _scan_temporary(self, found: _ScanResult, without: str) -> None:
        """Remove temporary files of dead writers, and count those of live ones."""
        now = time.time()
        for entry, size in self._folder.written_aside():
            if entry.path == without:
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                age = now - status.st_mtime
                if age > _ASIDE_WITHOUT_LOCKS_S or (age > ASIDE_S and is_abandoned(entry.path)):
                    os.unlink(entry.path)
                elif status.st_nlink == 1:  # a file with two links is counted under its page's name
                    found.used_bytes += cost_of(size)
                    found.num_pages += 1


class _ScanResult:
    """The results of a scan."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.num_pages = 0
        self._youngest_first: list[tuple[int, int, _Candidate]] = []
        """A heap of the least recently used pages, with the most recently used of them on top."""

    def add(self, candidate: _Candidate) -> None:
        self.used_bytes += cost_of(candidate.size)
        self.num_pages += 1
        item = (-candidate.used_ns, self.num_pages, candidate)
        if len(self._youngest_first) < _MAX_CANDIDATES:
            heapq.heappush(self._youngest_first, item)
        else:
            heapq.heappushpop(self._youngest_first, item)

    def oldest(self) -> list[_Candidate]:
        return [item[2] for item in sorted(self._youngest_first, reverse=True)]
