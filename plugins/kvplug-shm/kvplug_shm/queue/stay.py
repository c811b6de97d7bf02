"""Who is inside an end of a queue, one thread at a time, and how the end is closed around it."""

from __future__ import annotations

import threading

from kvplug import BusyError, ClosedError, Deadline


class Stay:
    """``with stay:`` around each call that waits, sends or receives.

    Raises:
        ClosedError: the end is closed.
        BusyError: another thread is inside.
    """

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.Lock()
        self._inside = 0
        self._shutting = threading.Lock()

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

    def emptied(self, deadline: Deadline) -> bool:
        """After :meth:`shut`: whether nobody is inside any more, at the deadline at the latest.

        Not if it is the caller itself who is inside, with a chunk.
        """
        if self._inside == threading.get_ident():
            return False
        left = deadline.remaining()
        return self._lock.acquire(timeout=-1 if left is None else left)

    def inherit(self) -> None:
        """This is a forked child: the end is its parent's. Takes no lock."""
        self.closed = True
