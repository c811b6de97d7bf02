"""Requests whose answer is their result: lookups and removals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvplug.transport import Job, JobTask, MissReason

T = TypeVar("T")


class Question(JobTask, Generic[T]):
    """One job, which may need several requests. It ends with the last answer, or with what is known."""

    def __init__(self, job: Job[T], unknown: T, num_requests: int) -> None:
        super().__init__(job, None)
        self._unknown = unknown
        self._left = num_requests

    def answer(self, at: int, results: Sequence[T]) -> None:
        """The results of some keys, from key ``at`` on."""
        with self.lock:
            for index, result in enumerate(results, at):
                self.note(index, result)
            self._left -= 1
            is_finished = not self._left
        if is_finished:
            self.end(None)

    def result_for(self, reason: MissReason | None) -> T:
        return self._unknown
