"""Who is inside an end of a queue, one thread at a time, and how the end is closed around it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from kvplug import BusyError, ClosedError, Deadline

_AGAIN_S: Final = 0.005


class Stay:
    """``with stay:`` around each call that waits, sends or receives.

    Raises:
        ClosedError: the end is closed.
        BusyError: another thread is inside.
    """

    def __init__(self, drop: Callable[[], None]) -> None:
        """``drop`` is called once, when the end is over and nobody is inside: no memory is used any more."""
        self.closed = False
        self._drop = drop
        self._lock = threading.Lock()
        """Held by whoever is inside; and for good from when nobody can be any more."""
        self._inside = 0
        self._shutting = threading.Lock()
        self._empty = False
        self._over = False

    def __enter__(self) -> None:
        if self.closed:
            self.check()
        if not self._lock.acquire(blocking=False):
            self.check()
            raise BusyError("another thread is already at this end of the queue; one at a time")
        if self.closed:
            self._lock.release()
            self.check()
        self._inside = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._inside = 0
        self._lock.release()
        if self._over:
            self._settle()

    def check(self) -> None:
        """Raises ClosedError if the end is closed."""
        if self.closed:
            raise ClosedError("this end of the queue is closed")

    def shut(self) -> bool:
        """Nobody enters any more; whoever is inside finds out by :meth:`check`. True for the first caller."""
        if self.closed or not self._shutting.acquire(blocking=False):
            return False
        self.closed = True
        return True

    def emptied(self, deadline: Deadline, wake: Callable[[], None]) -> bool:
        """After :meth:`shut`: whether nobody else is inside any more, at the deadline at the latest.

        The caller itself may be, with a chunk. ``wake`` wakes whoever sleeps there; it is called again and
        again, for somebody may have been about to.
        """
        if self._inside == threading.get_ident():
            return True
        while not (empty := self._lock.acquire(timeout=_AGAIN_S)) and not deadline.expired:
            wake()
        self._empty = empty
        return empty

    def over(self) -> None:
        """After :meth:`shut`, when all else is done."""
        self._over = True
        if self._empty:
            self._drop()
        else:
            self._settle()

    def _settle(self) -> None:
        if self._lock.acquire(blocking=False):
            self._drop()

    def inherit(self) -> None:
        """This is a forked child: the end is its parent's. Takes no lock."""
        self.closed = True
