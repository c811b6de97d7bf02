"""The requests of this end that are under way at the store in the other process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvplug.transport import Job, JobTask, MissReason, Outbox, Usage, close_after_fork
from kvplug_host import protocol
from kvplug_host.protocol import Answer, Request

T = TypeVar("T")

Take = Callable[[Any], None]
"""Called with each answer to a request, which has the type that the request names."""


class Question(JobTask, Generic[T]):
    """A job whose result is the answer, of several requests if need be. It ends with the last of them, or
    with what is known."""

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


class Requests:
    """Messages to the other process, and what is called with its answers. Thread-safe."""

    def __init__(
        self, outbox: Outbox | None = None, note_usage: Callable[[Usage], object] = lambda usage: None
    ) -> None:
        """
        Args:
            outbox: ``None``: there is no other process.
            note_usage: called with what the store holds, whenever an answer states it.
        """
        self._outbox = outbox
        self._note_usage = note_usage
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._listening: dict[int, tuple[type[Request], Take, JobTask | None]] = {}
        """With the job that ends when the store is gone, if there is one."""
        self.over: MissReason | None = MissReason.STORE_GONE if outbox is None else None
        """Why nothing is sent any more."""
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        self.over = self.over or MissReason.CLOSED

    def new_number(self) -> int:
        """The number of another request."""
        return next(self._numbers)

    def query(self, request: Request, job: JobTask, take: Take) -> None:
        """Send a request of that job, which ends if that is not possible."""
        if not self.listen(request, take, job):
            job.end(self.over or MissReason.STORE_GONE)

    def listen(self, request: Request, take: Take, job: JobTask | None = None) -> bool:
        """Send a request, and take its answers until the last of them, or until the end of the job. Returns
        whether it was sent."""
        with self._lock:
            outbox = self._outbox if self.over is None and not (job is not None and job.is_over) else None
            if outbox is not None:
                self._listening[request.id] = type(request), take, job
        if outbox is not None and outbox.send(protocol.message_of(request)):
            return True
        self.forget(request.id)
        return False

    def notify(self, request: Request) -> None:
        """Send a request that has no answer. It is lost if the store does not read."""
        if self.over is None and self._outbox is not None:
            self._outbox.send(protocol.message_of(request))

    def answered(self, message: Any) -> None:
        """Take an answer. Raises WireError: it is malformed."""
        number = protocol.number_in(message)
        kind, take, _ = self._listening.get(number, (None, None, None))
        if kind is None or take is None:
            return
        answer = kind.answer_in(message)
        if isinstance(answer, Answer):
            if answer.usage is not None:
                self._note_usage(answer.usage)
            if answer.is_last:
                self.forget(number)
        take(answer)

    def forget(self, number: int) -> None:
        """Take no more answers to a request."""
        with self._lock:
            self._listening.pop(number, None)

    def ended(self, job: JobTask) -> None:
        """A job has ended: it waits for no answer."""
        with self._lock:
            for number in [number for number, (_, _, each) in self._listening.items() if each is job]:
                del self._listening[number]

    def end(self, reason: MissReason) -> set[JobTask]:
        """Send nothing any more. Returns the jobs that wait for an answer. The first reason counts."""
        with self._lock:
            self.over = self.over or reason
            listening, self._listening = self._listening, {}
        return {job for _, _, job in listening.values() if job is not None}
