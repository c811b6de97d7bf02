"""Requests whose answer is their result: lookups and removals."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from kvplug.transport import Job
from kvplug_host.jobs.clock import Alarm, Clock

T = TypeVar("T")


class Question(Generic[T]):
    """One job, which may need several requests. It ends with the last answer, or with what is known."""

    def __init__(self, job: Job[T], unknown: T, num_requests: int) -> None:
        self.job = job
        self._results = [unknown] * job.count
        self._left = num_requests
        self._lock = threading.RLock()
        self._alarm: Alarm | None = None

    def begin(self, clock: Clock) -> None:
        """From now on it ends by its deadline.

        Raises:
            RuntimeError: this process can have no more threads.
        """
        self.job.on_cancel(self.end)
        self._alarm = clock.at(self.job.deadline.at, self.end)
        if not self._left:
            self.end()

    def answer(self, at: int, results: Sequence[T]) -> None:
        """The results of some keys, from key ``at`` on."""
        with self._lock:
            self._results[at : at + len(results)] = results
            self._left -= 1
            finished = not self._left
        if finished:
            self.end()

    def end(self) -> None:
        """It ends with what is known."""
        with self._lock:
            results = list(self._results)
        if self._alarm is not None:
            self._alarm.cancel()
        self.job.set(results)

    def after_fork(self) -> None:
        """In a forked child: the job is the parent's, and ends here."""
        self.job.after_fork(self._results)
