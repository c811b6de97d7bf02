"""The requests of this end that are under way at the store in the other process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from kvplug.transport import JobTask, MissReason, close_after_fork
from kvplug_host import protocol
from kvplug_host.outbox import Outbox

Answer = Callable[[Any], None]


class Requests:
    """Messages to the other process, and what is called with its answers. Thread-safe."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        self._waiting: dict[int, JobTask] = {}
        """The jobs of those requests: they end when the store is gone."""
        self._kept: set[int] = set()
        """Requests that may be answered after the end of their jobs, and are forgotten later."""
        self.over: MissReason | None = None
        """Why nothing is sent any more."""
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        self.over = self.over or MissReason.CLOSED

    def new_number(self) -> int:
        """The id of another request."""
        return next(self._numbers)

    def ask(
        self, number: int, job: JobTask, message: dict[str, Any], answer: Answer, *, keep: bool = False
    ) -> bool:
        """Send a request of that job. Returns whether it was sent: else the job has ended.

        ``keep``: it may be answered after the end of the job, until it is forgotten.
        """
        if self.listen(number, message, answer, job, keep=keep):
            return True
        job.end(self.over or MissReason.STORE_GONE)
        return False

    def listen(
        self,
        number: int,
        message: dict[str, Any],
        answer: Answer,
        job: JobTask | None = None,
        *,
        keep: bool = False,
    ) -> bool:
        """Send a request, which is answered any number of times. Returns whether it was sent."""
        with self._lock:
            sends = self.over is None
            if sends:
                self._answers[number] = answer
                if job is not None:
                    self._waiting[number] = job
                if keep:
                    self._kept.add(number)
        if sends and self._outbox.send({**message, "id": number}):
            return True
        self.forget(number)
        return False

    def tell(self, message: dict[str, Any]) -> None:
        """Send what has no answer. Where the store does not read, it is lost."""
        if self.over is None:
            self._outbox.send(message)

    def answered(self, message: Any) -> None:
        """An answer has come. Raises what is wrong with it: WireError."""
        answer = self._answers.get(protocol.number(message, "id"))
        if answer is not None:
            answer(message)

    def forget(self, number: int) -> None:
        """A request has had its last answer."""
        with self._lock:
            self._answers.pop(number, None)
            self._waiting.pop(number, None)
            self._kept.discard(number)

    def ended(self, job: JobTask) -> None:
        """A job has ended: it waits for no answer."""
        with self._lock:
            for number in [number for number, each in self._waiting.items() if each is job]:
                del self._waiting[number]
                if number not in self._kept:
                    self._answers.pop(number, None)

    def end(self, reason: MissReason) -> set[JobTask]:
        """Send nothing any more. Returns the jobs that wait for an answer. The first reason counts."""
        with self._lock:
            self.over = self.over or reason
            waiting = set(self._waiting.values())
            self._answers.clear()
            self._waiting.clear()
            self._kept.clear()
        return waiting
