"""One thread at a time in each direction."""

from __future__ import annotations

import threading

from kvplug.errors import BusyError


class Turn:
    """One direction of an endpoint: whoever is second gets :class:`BusyError` instead of a mixed stream."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()

    def taken(self) -> Turn:
        """For a ``with`` statement around the whole call.

        Raises:
            BusyError: another thread is inside one.
        """
        return self

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError(f"another thread is already {self._what}; one thread sends, one receives")

    def __exit__(self, *_: object) -> None:
        self._lock.release()
