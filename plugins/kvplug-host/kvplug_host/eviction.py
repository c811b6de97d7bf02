"""Which page goes when room is needed: an adaptive replacement of pages by use.

ARC (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003): pages that were used
once and pages that were used again are two queues, least recently used first. The keys of pages that were
evicted are remembered; a page that comes back says from which queue too many were evicted. So a document that
is seen once does not push out prompts that come again. ``benchmarks/eviction.py`` compares it with others.

Differences: pages that may not go now (leased, or being read) are set aside until they may; and a page is
evicted before the one that takes its place is known.

Pure: no lock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

_Queue = OrderedDict[bytes, None]


class Eviction:
    """The order of the pages of one size.

    >>> order = Eviction()
    >>> for key in (b"a", b"b", b"c"):
    ...     order.add(key)
    >>> order.use(b"a")
    >>> order.victim(lambda key: True), order.victim(lambda key: True), len(order)
    (b'b', b'c', 1)
    """

    def __init__(self) -> None:
        self._once: _Queue = OrderedDict()
        self._often: _Queue = OrderedDict()
        self._once_gone: _Queue = OrderedDict()
        self._often_gone: _Queue = OrderedDict()
        self._aside: dict[bytes, _Queue] = {}
        """Pages that could not go when it was their turn, and the queue that they belong to."""
        self._goal = 0.0
        """How many pages should be in the queue of those that were used once."""
        self._most = 1
        """The most pages there were when one was evicted."""

    def __len__(self) -> int:
        return len(self._once) + len(self._often) + len(self._aside)

    def add(self, key: bytes) -> None:
        """A page has come."""
        once, often = len(self._once_gone), len(self._often_gone)
        if key in self._once_gone:
            del self._once_gone[key]
            self._goal = min(self._most, self._goal + max(1.0, often / once))
            self._often[key] = None
        elif key in self._often_gone:
            del self._often_gone[key]
            self._goal = max(0.0, self._goal - max(1.0, once / often))
            self._often[key] = None
        else:
            self._once[key] = None

    def use(self, key: bytes) -> None:
        """A page was used."""
        if key in self._aside:
            self._aside[key] = self._often
        else:
            self._once.pop(key, None)
            self._often[key] = None
            self._often.move_to_end(key)

    def refresh(self, key: bytes) -> None:
        """A page is to go after those that have come meanwhile; that does not count as a use."""
        for queue in (self._once, self._often):
            if key in queue:
                queue.move_to_end(key)

    def discard(self, key: bytes) -> None:
        """A page is gone for another reason."""
        self._once.pop(key, None)
        self._often.pop(key, None)
        self._aside.pop(key, None)

    def victim(self, may_go: Callable[[bytes], bool]) -> bytes | None:
        """The page to evict, which is forgotten here; ``None``: none of them may go.

        Those that may not go are set aside, until :meth:`restore`.
        """
        self._most = max(self._most, len(self))
        while self._once or self._often:
            once = bool(self._once) and (len(self._once) > self._goal or not self._often)
            queue, gone = (self._once, self._once_gone) if once else (self._often, self._often_gone)
            key, _ = queue.popitem(last=False)
            if not may_go(key):
                self._aside[key] = queue
                continue
            gone[key] = None
            self._forget_gone()
            return key
        return None

    def restore(self, key: bytes) -> None:
        """A page that may have been set aside may go again; it goes after all others."""
        queue = self._aside.pop(key, None)
        if queue is not None:
            queue[key] = None

    def _forget_gone(self) -> None:
        while self._once_gone and len(self._once) + len(self._once_gone) > self._most:
            self._once_gone.popitem(last=False)
        while self._often_gone and len(self) + len(self._once_gone) + len(self._often_gone) > 2 * self._most:
            self._often_gone.popitem(last=False)

    def clear(self) -> None:
        """All pages are gone, and what was learnt with them."""
        self.__init__()  # type: ignore[misc]
