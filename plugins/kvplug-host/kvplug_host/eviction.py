"""Which page goes when room is needed: one that no engine waits for, chosen by an adaptive replacement.

A page *waits* while another engine is expected to read it: decode reads what prefill saved, for example.
Each :meth:`Eviction.expect` adds one reader, and each :meth:`Eviction.read` ends one. Waiting pages go only
when there are no others, in the order in which their readers were last expected. After :data:`MAX_WAIT_S` a
page waits no more, so a reader that never comes holds no memory for ever.

The others are ordered by ARC (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST
2003): pages that were used once and pages that were used again are two queues, least recently used first. The
keys of pages that were evicted are remembered; a page that returns shows from which queue too many were
evicted. So a document that is seen once does not push out prompts that come again. A page that is expected
again was used again. The read that it waited for is not a use: most pages that were handed over are never
needed again. ``benchmarks/eviction.py`` compares the policy with others.

Differences from ARC: pages that may not go now (leased, or being read) are set aside until they may; and a
page is evicted before the one that takes its place is known.

Each call takes a short time, however many pages there are: it looks at :data:`MOST_LOOKED_AT` pages at most.
Pure: no lock; the clock is passed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvplug_host.key_table import KeyTable

MAX_WAIT_S: Final = 600.0
"""How long a page waits since a reader was last expected: longer than most clients wait for an answer."""
MOST_LOOKED_AT: Final = 16
"""Pages that one call looks at."""


class _Page:
    """A page, or one that was evicted and is remembered."""

    __slots__ = ("after", "before", "key", "line", "num_readers", "then", "until")

    before: _Page
    after: _Page
    line: _Line
    """Where it is."""
    then: _Line
    """The line that it belongs to when it waits for no reader."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.num_readers = 0
        """The readers that it waits for."""
        self.until = 0.0
        """When it waits no more."""


class _Line:
    """Pages in an order, the next to go first. A linked list: an OrderedDict takes long when it grows."""

    __slots__ = ("_count", "_ends")

    def __init__(self) -> None:
        self._ends = ends = _Page(b"")
        ends.before = ends.after = ends
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def first(self) -> _Page:
        return self._ends.after

    def insert(self, page: _Page, after: _Page | None = None) -> None:
        """Add a page as the last one, or before another one."""
        after = after or self._ends
        page.line, page.before, page.after = self, after.before, after
        after.before.after = after.before = page
        self._count += 1

    def remove(self, page: _Page) -> None:
        before, after = page.before, page.after
        before.after, after.before = after, before
        self._count -= 1


class Eviction:
    """The order of the pages of one size.

    >>> order = Eviction()
    >>> for key in (b"a", b"b", b"c"):
    ...     order.add(key)
    >>> order.use(b"a")
    >>> order.expect(b"b")
    >>> may_go = lambda key: True
    >>> order.victim(may_go), order.victim(may_go), order.victim(may_go), len(order)
    (b'c', b'a', None, 1)
    >>> order.longest_waiting(may_go), len(order)
    (b'b', 0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pages: KeyTable[_Page] = KeyTable()
        self._once = _Line()
        self._often = _Line()
        self._waiting = _Line()
        self._aside = _Line()
        """Pages that could not go when it was their turn."""
        self._once_gone = _Line()
        self._often_gone = _Line()
        self.num_waiting = 0
        """Pages whose readers have not come."""
        self._goal = 0.0
        """How many pages should be in the line of those that were used once."""
        self._most = 1
        """The most pages there were when one was evicted."""

    def __len__(self) -> int:
        return len(self._once) + len(self._often) + len(self._waiting) + len(self._aside)

    def num_in_line(self, *, waiting: bool = False) -> int:
        """Pages that :meth:`victim` has not set aside; ``waiting``: that :meth:`longest_waiting` has not."""
        return len(self._waiting) if waiting else len(self._once) + len(self._often)

    def is_waiting(self, key: bytes) -> bool:
        """Whether a reader is expected that has not come."""
        page = self._pages.get(key)
        return page is not None and page.num_readers > 0

    def _held(self, key: bytes) -> _Page:
        return self._pages.parts[key[0]][key]

    def _move(self, page: _Page, line: _Line) -> None:
        page.line.remove(page)
        line.insert(page)

    def _wait(self, page: _Page, num_readers: int) -> None:
        self.num_waiting += (num_readers > 0) - (page.num_readers > 0)
        page.num_readers = num_readers

    def add(self, key: bytes, num_readers: int = 0) -> None:
        """A page has come, and so many readers are expected."""
        page = self._pages.get(key)
        if page is None:
            page = _Page(key)
            self._pages.add(key, page)
            page.then = self._once
        else:
            once, often = len(self._once_gone), len(self._often_gone)
            if page.line is self._once_gone:
                self._goal = min(self._most, self._goal + max(1.0, often / once))
            else:
                self._goal = max(0.0, self._goal - max(1.0, once / often))
            page.line.remove(page)
            page.then = self._often
        if num_readers:
            self._wait(page, num_readers)
            page.until = self._clock() + MAX_WAIT_S
            self._waiting.insert(page)
        else:
            page.then.insert(page)

    def expect(self, key: bytes) -> None:
        """One more engine is going to read a page, which counts as a use."""
        page = self._held(key)
        self._wait(page, page.num_readers + 1)
        page.until = self._clock() + MAX_WAIT_S
        page.then = self._often
        if page.line is not self._aside:
            self._move(page, self._waiting)

    def read(self, key: bytes) -> None:
        """An engine that was expected has read a page. If none was, this is a use."""
        page = self._held(key)
        if not page.num_readers:
            self.use(key)
            return
        self._wait(page, page.num_readers - 1)
        if not page.num_readers and page.line is not self._aside:
            self._move(page, page.then)

    def use(self, key: bytes) -> None:
        """A page was used."""
        page = self._pages.parts[key[0]][key]
        often = page.then = self._often
        if page.line is self._once or page.line is often:
            page.line.remove(page)
            often.insert(page)

    def refresh(self, key: bytes) -> None:
        """A page is to go after those that have come meanwhile; that does not count as a use."""
        page = self._held(key)
        if page.line is not self._aside:
            self._move(page, page.line)

    def discard(self, key: bytes) -> None:
        """A page is gone for another reason."""
        page = self._held(key)
        self.num_waiting -= page.num_readers > 0
        self._forget(page)

    def _forget(self, page: _Page) -> None:
        page.line.remove(page)
        self._pages.pop(page.key)

    def victim(self, may_go: Callable[[bytes], bool]) -> bytes | None:
        """The page to evict, which is forgotten here; ``None``: none of the next pages may go.

        Those that may not go are set aside, until :meth:`restore`. :meth:`num_in_line` counts the others.
        """
        self._most = max(self._most, len(self))
        self._end_waits()
        for _ in range(min(MOST_LOOKED_AT, self.num_in_line())):
            once = bool(self._once) and (len(self._once) > self._goal or not self._often)
            line, gone = (self._once, self._once_gone) if once else (self._often, self._often_gone)
            if may_go(line.first.key):
                return self._gone(line.first, gone)
            self._move(line.first, self._aside)
        return None

    def longest_waiting(self, may_go: Callable[[bytes], bool]) -> bytes | None:
        """As :meth:`victim`, of the pages that wait for readers."""
        for _ in range(min(MOST_LOOKED_AT, len(self._waiting))):
            page = self._waiting.first
            if may_go(page.key):
                self._wait(page, 0)
                return self._gone(page, self._once_gone)
            self._move(page, self._aside)
        return None

    def _gone(self, page: _Page, line: _Line) -> bytes:
        self._move(page, line)
        for _ in range(MOST_LOOKED_AT):
            num_once_gone = len(self._once_gone)
            if num_once_gone and len(self._once) + num_once_gone > self._most:
                self._forget(self._once_gone.first)
            elif self._often_gone and len(self) + num_once_gone + len(self._often_gone) > 2 * self._most:
                self._forget(self._often_gone.first)
            else:
                break
        return page.key

    def restore(self, key: bytes) -> None:
        """A page that may have been set aside may go again; it goes after all others."""
        page = self._pages.parts[key[0]].get(key)
        if page is not None and page.line is self._aside:
            self._move(page, self._waiting if page.num_readers else page.then)

    def _end_waits(self) -> None:
        """Pages whose readers have not come in time are the next of the others to go."""
        now = self._clock() if self._waiting else 0.0
        for _ in range(min(MOST_LOOKED_AT, len(self._waiting))):
            page = self._waiting.first
            if page.until > now:
                return
            self._wait(page, 0)
            self._waiting.remove(page)
            page.then.insert(page, page.then.first)
