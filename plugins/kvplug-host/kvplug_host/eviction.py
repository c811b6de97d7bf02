"""Which page goes when room is needed: one that no engine waits for, chosen by an adaptive replacement.

A page *waits* while another engine is expected to read it: decode reads what prefill saved, for example.
Each :meth:`Eviction.expect` adds one reader, and each :meth:`Eviction.read` ends one. Waiting pages go only
when there are no others, in the order in which their readers were last expected. After :data:`MAX_WAIT_S` a
page waits no more, so a reader that never comes holds no memory for ever.

The others are ordered by ARC (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST
2003): pages that were used once and pages that were used again are two queues, least recently used first. The
keys of pages that were evicted are remembered; a page that comes back says from which queue too many were
evicted. So a document that is seen once does not push out prompts that come again. A page that is expected
again was used again. The read that it waited for is not a use: most pages that were handed over are never
needed again. ``benchmarks/eviction.py`` compares the policy with others.

Differences from ARC: pages that may not go now (leased, or being read) are set aside until they may; and a
page is evicted before the one that takes its place is known.

Each call takes a short time, however many pages there are: it looks at :data:`MOST_LOOKED_AT` pages at most.
Pure: no lock; the clock is passed in."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

MAX_WAIT_S: Final = 600.0
"""How long a page waits since a reader was last expected: longer than most clients wait for an answer."""

MOST_LOOKED_AT: Final = 64
"""Pages that one call looks at."""


_Queue = OrderedDict[bytes, None]
"""Pages, the next to go first."""


class _Wait(NamedTuple):
    """The readers that a page waits for."""

    num_readers: int
    until: float
    then: _Queue
    """The queue that the page goes to when no reader is left."""


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
        self._once: _Queue = OrderedDict()
        self._often: _Queue = OrderedDict()
        self._waiting: OrderedDict[bytes, _Wait] = OrderedDict()
        self._once_gone: _Queue = OrderedDict()
        self._often_gone: _Queue = OrderedDict()
        self._aside: dict[bytes, _Queue] = {}
        """Pages that could not go when it was their turn, and the queue that they belong to."""
        self._waiting_aside: dict[bytes, _Wait] = {}
        """The same of pages that wait."""
        self._goal = 0.0
        """How many pages should be in the queue of those that were used once."""
        self._most = 1
        """The most pages there were when one was evicted."""

    def __len__(self) -> int:
        return len(self._once) + len(self._often) + len(self._aside) + self.num_waiting

    def num_in_line(self, *, waiting: bool = False) -> int:
        """Pages that :meth:`victim` has not set aside; ``waiting``: that :meth:`longest_waiting` has not."""
        return len(self._waiting) if waiting else len(self._once) + len(self._often)

    @property
    def num_waiting(self) -> int:
        """Pages whose readers have not come."""
        return len(self._waiting) + len(self._waiting_aside)

    def is_waiting(self, key: bytes) -> bool:
        """Whether a reader is expected that has not come."""
        return key in self._waiting or key in self._waiting_aside

    def add(self, key: bytes, num_readers: int = 0) -> None:
        """A page has come, and so many readers are expected."""
        once, often = len(self._once_gone), len(self._often_gone)
        if key in self._once_gone:
            del self._once_gone[key]
            self._goal = min(self._most, self._goal + max(1.0, often / once))
            queue = self._often
        elif key in self._often_gone:
            del self._often_gone[key]
            self._goal = max(0.0, self._goal - max(1.0, once / often))
            queue = self._often
        else:
            queue = self._once
        if num_readers:
            self._waiting[key] = _Wait(num_readers, self._clock() + MAX_WAIT_S, queue)
        else:
            queue[key] = None

    def expect(self, key: bytes) -> None:
        """One more engine is going to read a page, which counts as a use."""
        wait = self._wait(key)
        readers = 1 if wait is None else 1 + wait.num_readers
        is_aside = self._remove(key)
        waiting = self._waiting_aside if is_aside else self._waiting
        waiting[key] = _Wait(readers, self._clock() + MAX_WAIT_S, self._often)

    def read(self, key: bytes) -> None:
        """An engine that was expected has read a page. If none was, this is a use."""
        wait = self._wait(key)
        if wait is None:
            self.use(key)
        elif wait.num_readers == 1:
            self._move(key, wait.then)
        else:
            self._wait_on(key, wait._replace(num_readers=wait.num_readers - 1))

    def use(self, key: bytes) -> None:
        """A page was used."""
        if key in self._often:  # fast, and the usual case
            self._often.move_to_end(key)
        elif key in self._once:
            del self._once[key]
            self._often[key] = None
        elif (wait := self._wait(key)) is None:
            self._move(key, self._often)
        else:
            self._wait_on(key, wait._replace(then=self._often))

    def _wait(self, key: bytes) -> _Wait | None:
        return self._waiting.get(key) or self._waiting_aside.get(key)

    def _wait_on(self, key: bytes, wait: _Wait) -> None:
        """A page goes on waiting, where it is in the queue."""
        waiting = self._waiting if key in self._waiting else self._waiting_aside
        waiting[key] = wait

    def _move(self, key: bytes, queue: _Queue) -> None:
        """A page waits for no reader, and is the last of that queue."""
        if self._remove(key):
            self._aside[key] = queue
        else:
            queue[key] = None

    def _remove(self, key: bytes) -> bool:
        """Take a page from where it is. Returns whether it was set aside."""
        for queue in (self._once, self._often, self._waiting):
            queue.pop(key, None)
        is_aside = key in self._aside or key in self._waiting_aside
        self._aside.pop(key, None)
        self._waiting_aside.pop(key, None)
        return is_aside

    def refresh(self, key: bytes) -> None:
        """A page is to go after those that have come meanwhile; that does not count as a use."""
        for queue in (self._once, self._often, self._waiting):
            if key in queue:
                queue.move_to_end(key)

    def discard(self, key: bytes) -> None:
        """A page is gone for another reason."""
        self._remove(key)

    def victim(self, may_go: Callable[[bytes], bool]) -> bytes | None:
        """The page to evict, which is forgotten here; ``None``: of the next pages none may go.

        Those that may not go are set aside, until :meth:`restore`. :meth:`num_in_line` says whether there are
        others.
        """
        self._most = max(self._most, len(self))
        if self._waiting:
            self._end_waits()
        for _ in range(min(MOST_LOOKED_AT, self.num_in_line())):
            once = bool(self._once) and (len(self._once) > self._goal or not self._often)
            queue, gone = (self._once, self._once_gone) if once else (self._often, self._often_gone)
            key, _ = queue.popitem(last=False)
            if may_go(key):
                return self._gone(key, gone)
            self._aside[key] = queue
        return None

    def longest_waiting(self, may_go: Callable[[bytes], bool]) -> bytes | None:
        """As :meth:`victim`, of the pages that wait for readers."""
        for _ in range(min(MOST_LOOKED_AT, len(self._waiting))):
            key, wait = self._waiting.popitem(last=False)
            if may_go(key):
                return self._gone(key, self._once_gone)
            self._waiting_aside[key] = wait
        return None

    def _gone(self, key: bytes, gone: _Queue) -> bytes:
        gone[key] = None
        for _ in range(2):  # more than are added, so there are not too many for long
            if self._once_gone and len(self._once) + len(self._once_gone) > self._most:
                self._once_gone.popitem(last=False)
            if self._often_gone and len(self) + len(self._once_gone) + len(self._often_gone) > 2 * self._most:
                self._often_gone.popitem(last=False)
        return key

    def restore(self, key: bytes) -> None:
        """A page that may have been set aside may go again; it goes after all others."""
        if key in self._waiting_aside:
            self._waiting[key] = self._waiting_aside.pop(key)
        elif key in self._aside:
            self._aside.pop(key)[key] = None

    def _end_waits(self) -> None:
        """Pages whose readers have not come in time are the next of the others to go."""
        now = self._clock()
        for _ in range(min(MOST_LOOKED_AT, len(self._waiting))):
            key, wait = next(iter(self._waiting.items()))
            if wait.until > now:
                return
            del self._waiting[key]
            wait.then[key] = None
            wait.then.move_to_end(key, last=False)
