"""Calls at given times, in one thread that starts with the first of them."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvplug.transport import BackgroundThread, Deadline

_log = logging.getLogger(__name__)

_MANY: Final = 8
"""Calls that were cancelled, from which on they are cleared away."""


class Alarm:
    """A call to come. ``cancel`` it when it is not needed; from any thread, at any time."""

    __slots__ = ("_clock", "at", "call")

    def __init__(self, clock: Clock, at: float, call: Callable[[], None]) -> None:
        self._clock = clock
        self.at = at
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """It is not called, unless it is being called now. Idempotent."""
        if self.call is not None:
            self.call = None
            self._clock._cancelled += 1


class Clock:
    """The calls of one store. They must not block. After :meth:`close` nothing is called."""

    def __init__(self, name: str, stop: Callable[[], object]) -> None:
        """``stop``: ends the store, without waiting, when the program leaves."""
        self._name = name
        self._stop = stop
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._cancelled = 0

    def at(self, when: float, call: Callable[[], None]) -> Alarm:
        """Call it at that time of the monotonic clock; ``math.inf``: never.

        Raises:
            RuntimeError: this process can have no more threads.
        """
        alarm = Alarm(self, when, call)
        if when == float("inf"):
            return alarm
        with self._lock:
            if self._thread is None and not self._closed:
                thread = BackgroundThread(self._run, name=f"kvplug-{self._name}-clock", stop=self._stop)
                thread.start()
                self._thread = thread
            if self._cancelled > _MANY and self._cancelled > len(self._due) // 2:
                self._due = [item for item in self._due if item[2].call is not None]
                heapq.heapify(self._due)
                self._cancelled = 0
            earliest = not self._due or when < self._due[0][0]
            heapq.heappush(self._due, (when, next(self._numbers), alarm))
            if earliest:
                self._changed.notify()
        return alarm

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                pause = self._due[0][0] - time.monotonic() if self._due else None
                if pause is None or pause > 0:
                    self._changed.wait(None if pause is None else min(pause, 1e6))
                    continue
                _, _, alarm = heapq.heappop(self._due)
            call, alarm.call = alarm.call, None
            if call is None:
                continue
            try:
                call()
            except Exception:  # the other calls come in time
                _log.exception("a call of the store %r at a given time failed", self._name)

    def close(self) -> None:
        """Call nothing any more. Does not wait for a call under way."""
        with self._lock:
            self._closed = True
            self._due.clear()
            self._changed.notify_all()

    def join(self, deadline: Deadline) -> None:
        """After :meth:`close`: wait for the thread to end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline.remaining())
