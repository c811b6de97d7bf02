"""What requests for pages and puts have in common: steps, results, and how they end."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from kvplug.transport import Job, MissReason, PutReason
from kvplug_host.jobs.clock import Alarm, Clock
from kvplug_host.jobs.workers import Task

_log = logging.getLogger(__name__)

UNKNOWN: Final = object()
"""The result of a page of which nothing is known yet."""
STEP_BYTES: Final = 2 << 20
"""Of the copies between two looks at the other tasks. They fit into the cache of one core or two."""

PUT_STEP_BYTES: Final = 2 * STEP_BYTES
"""The same of puts, which look up, make headers and publish in each step."""


class OverError(Exception):
    """The job ended before the copy began."""


class Steps(Task):
    """The steps of one job, which may run in several threads at once.

    Ends once: with the last step, at the deadline, by ``cancel``, or with the store. When a step copies from
    or into the caller's memory at that moment, the job is done and settles with the end of the copy.
    """

    def __init__(self, job: Job[Any], num_steps: int | None) -> None:
        """``num_steps``: it ends with the last of them; ``None``: its end is not that of a step."""
        self.job = job
        self.results: list[Any] = [UNKNOWN] * job.count
        self.lock = threading.RLock()
        """Held while results change and while the job ends."""
        self.is_over = False
        self._num_steps: int | None = num_steps
        self._begun = self._ended = 0
        self._copies = 0
        self._alarm: Alarm | None = None
        self._on_end: list[Callable[[Steps], None]] = []

    # -- steps ---------------------------------------------------------------------------------

    def next_step(self) -> int | None:
        if not self.has_steps():
            return None
        self._begun += 1
        return self._begun - 1

    def has_steps(self) -> bool:
        return not self.is_over and self._num_steps is not None and self._begun < self._num_steps

    def run(self, step: int) -> None:
        try:
            self.do(step)
        except OverError:
            return
        except MemoryError:
            self.end(MissReason.NO_MEMORY)
        except Exception:
            # The caller's memory is at fault: what else is called here raises nothing.
            _log.exception("a request for %d pages failed", self.job.count)
            self.end(MissReason.OTHER)
        with self.lock:
            self._ended += 1
            finished = self._ended == self._num_steps
        if finished:
            self.end(None)

    @abc.abstractmethod
    def do(self, step: int) -> None:
        """Do that step. May raise whatever the caller's memory raises.

        Raises:
            OverError: the job has ended.
        """

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around a copy from or into the caller's memory.

        Raises:
            OverError: the job has ended, and its memory must not be touched.
        """
        with self.lock:
            if self.is_over:
                raise OverError
            self._copies += 1
        try:
            yield
        finally:
            if self._copied():
                self._settled()
                self.job.settle()

    def _copied(self) -> bool:
        """A copy has ended. Returns whether the job settles with it."""
        with self.lock:
            self._copies -= 1
            return self.is_over and not self._copies

    # -- the end -------------------------------------------------------------------------------

    def begin(self, clock: Clock, on_end: Callable[[Steps], None]) -> None:
        """From now on it ends by its deadline. ``on_end``: called when it has.

        Raises:
            RuntimeError: this process can have no more threads.
        """
        self._on_end.append(on_end)
        self.job.on_cancel(lambda: self.end(MissReason.CANCELLED))
        self._alarm = clock.at(self.job.deadline.at, lambda: self.end(MissReason.TIMEOUT))

    def end(self, reason: MissReason | None) -> None:
        """The job is done, unless it was before. ``None``: each page has its result, or succeeded."""
        with self.lock:
            if self.is_over:
                return
            self.is_over = True
            results = self.final(reason)
            settled = not self._copies
        if self._alarm is not None:
            self._alarm.cancel()
        if settled:
            self._settled()
        self.job.set(results, settled=settled)
        on_end, self._on_end = self._on_end, []
        for call in on_end:
            call(self)

    def final(self, reason: MissReason | None) -> list[Any]:
        """With the lock: the results of the job when it ends for that reason."""
        return [reason if each is UNKNOWN else each for each in self.results]

    def _settled(self) -> None:
        """Once: the job is over, and no copy is under way. Called before the job settles."""

    def after_fork(self) -> None:
        """In a forked child: the job is the parent's, and ends here."""
        self.lock = threading.RLock()
        self.is_over = True
        self.job.after_fork(self.final(MissReason.CLOSED))


def put_results(
    results: Sequence[Any], reason: MissReason | None, forgotten: Sequence[bool]
) -> list[PutReason | None]:
    """The results of a put that ends for that reason. ``forgotten``: pages that were removed meanwhile, also
    if they were there before."""
    left = None if reason is None else PutReason.of(reason)
    ended = [left if each is UNKNOWN else each for each in results]
    return [
        PutReason.CANCELLED if gone and each is None else each
        for each, gone in zip(ended, forgotten, strict=True)
    ]


def page_ranges(count: int, page_bytes: int, step_bytes: int = STEP_BYTES) -> list[range]:
    """Consecutive pages, of about ``step_bytes`` together."""
    each = max(1, step_bytes // max(1, page_bytes))
    return [range(first, min(first + each, count)) for first in range(0, count, each)]


def layer_ranges(num_layers: int, layer_bytes: int) -> list[range]:
    """Consecutive layers, of about :data:`STEP_BYTES` together, if a layer of all pages has so many bytes."""
    each = max(1, STEP_BYTES // max(1, layer_bytes))
    return [range(first, min(first + each, num_layers)) for first in range(0, num_layers, each)]


def runs_of(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges of consecutive ones."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[begin], numbers[at - 1] + 1)
            begin = at
