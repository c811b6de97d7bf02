"""Lets one thread at a time use each direction of an endpoint."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from kvplug.errors import BusyError


class ExclusiveUse:
    """One direction of an endpoint: a second thread gets :class:`BusyError` instead of a mixed stream.

    >>> use = ExclusiveUse("sending")
    >>> with use.taken(), use.taken():
    ...     pass
    Traceback (most recent call last):
        ...
    kvplug.errors.BusyError: another thread is already sending; one thread sends, one receives
    """

    def __init__(self, what: str) -> None:
        """``what`` describes the use in the error: "sending"."""
        self._what = what
        self._lock = threading.Lock()

    def _at_fork_reinit(self) -> None:
        """Free the lock in a forked child, where no thread holds it."""
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a thread holds the lock."""
        return self._lock.locked()

    def taken(self) -> AbstractContextManager[object]:
        """Return a context manager to hold for the whole call.

        Of two threads that enter at the very same moment, one waits for the other.

        Raises:
            BusyError: another thread holds the lock.
        """
        if self._lock.locked():
            raise BusyError(f"another thread is already {self._what}; one thread sends, one receives")
        # Return the lock itself: no signal is handled between acquiring it and the block. A Python
        # ``__enter__`` could be interrupted after acquiring the lock, which would then never be released.
        return self._lock
