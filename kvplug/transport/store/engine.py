"""The job engine: turns, deadlines, cancelling and settling, in one place for every store.

A :class:`JobTask` does the work of one job in steps. A :class:`JobEngine` runs the steps of a store's tasks
in a few threads, in turns, so that a job for thousands of pages does not hold up a job for a few. Another
thread enforces the deadlines, so a job ends in time even if a step blocks.

A task ends once: with its last step, at the deadline, by ``cancel``, or with the engine. If a step is copying
from or into the caller's memory at that moment, the job is done, and settles when the copy has ended.
"""

from __future__ import annotations

import abc
import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from kvplug.errors import ClosedError
from kvplug.net.deadline import Deadline
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread, ExitGuard
from kvplug.transport.store.job import Job
from kvplug.transport.store.results import MissReason

_log = logging.getLogger(__name__)

_MANY: Final = 8
"""Cancelled alarms are cleared away once there are more of them than this."""


class CopyError(Exception):
    """The caller's memory cannot be used. This is not a fault of the store."""


class JobEngine:
    """Runs the tasks of one store. Its threads start when there is work for them."""

    class Steps(abc.ABC):
        """Work in steps. Each step may run in any of the engine's threads."""

        is_urgent: bool = False
        """Whether its steps run before those of other work."""

        @abc.abstractmethod
        def next_step(self) -> int | None:
            """Begin a step and return its number, or ``None`` if no step can begin now. Called under the
            engine's lock."""

        @abc.abstractmethod
        def has_steps(self) -> bool:
            """Whether :meth:`next_step` would begin a step. Called under the engine's lock."""

        @abc.abstractmethod
        def run(self, step: int) -> None:
            """Run the step. Must not raise."""

    class Alarm:
        """A scheduled call. Any thread may ``cancel`` it at any time."""

        __slots__ = ("_engine", "call")

        def __init__(self, engine: JobEngine, call: Callable[[], object]) -> None:
            self._engine = engine
            self.call: Callable[[], object] | None = call
            """The function to call; ``None`` once it was called or cancelled."""

        def cancel(self) -> None:
            """Cancel the call, unless it is being made now. Idempotent."""
            if self.call is not None:
                self.call = None
                self._engine._num_cancelled += 1

    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        stop: Callable[[], object] | None = None,
        stuck_s: float = math.inf,
    ) -> None:
        """
        Args:
            name: the store's name, for messages and threads.
            num_threads: how many threads run steps.
            stop: called when the program exits; ends the store without waiting. Default: :meth:`give_up`.
            stuck_s: seconds after which a step counts as stuck. Another thread then replaces its thread, up
                to twice ``num_threads`` in total.
        """
        self._name = name
        self._num_threads = num_threads
        self._stop = stop or self.give_up
        self._stuck_s = stuck_s
        self._lock = threading.RLock()
        self._has_work = threading.Condition(self._lock)
        self._has_alarm = threading.Condition(self._lock)
        self._has_ended = threading.Condition(self._lock)
        self._urgent: deque[JobEngine.Steps] = deque()
        self._work: deque[JobEngine.Steps] = deque()
        self._tasks: dict[JobTask, None] = {}
        """Tasks under way, in the order of their submission."""
        self._running: dict[threading.Thread, tuple[float, JobEngine.Steps]] = {}
        """For each thread that runs a step: when the step began, and whose step it is."""
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._clock: threading.Thread | None = None
        self._alarms: list[tuple[float, int, JobEngine.Alarm]] = []
        self._numbers = itertools.count()
        self._num_cancelled = 0
        self.is_closing = False
        """Whether the engine refuses new jobs."""
        self._is_closed = False
        close_after_fork(self)

    def check_open(self) -> None:
        """Raise ClosedError if the engine refuses new jobs."""
        if self.is_closing:
            ExitGuard.hold()
            raise ClosedError(f"the store {self._name!r} is closed")

    # -- tasks ---------------------------------------------------------------------------------

    def submit(self, task: JobTask) -> None:
        """Begin a job with :meth:`begin`, and queue its steps."""
        if not self.begin(task):
            return
        if task.is_finished():
            task.end(None)
        elif not self.add(task):
            task.end(MissReason.STORE_GONE)

    def begin(self, task: JobTask) -> bool:
        """Ensure that the job ends by its deadline, by ``cancel``, or with the engine.

        Returns whether the job is under way. If no thread could start, it has ended as ``STORE_GONE``; if the
        engine is closed, as ``CLOSED``.
        """
        task._engine = self
        task.job.on_cancel(lambda: task.end(MissReason.CANCELLED))
        with self._lock:
            refused = MissReason.CLOSED if self.is_closing else None
            self._tasks[task] = None
            try:
                task._alarm = self.at(task.job.deadline.at, lambda: task.end(MissReason.TIMEOUT))
            except RuntimeError as e:
                self._log_no_thread(e)
                refused = refused or MissReason.STORE_GONE
        if refused is not None:
            task.end(refused)
        elif task.is_over:  # it ended meanwhile
            self.note_end(task)
        return not task.is_over

    def note_end(self, task: JobTask) -> None:
        """Forget a task, since its job is done."""
        with self._lock:
            self._tasks.pop(task, None)
            if self.is_closing:
                self._has_ended.notify_all()
                self._has_alarm.notify_all()

    def tasks(self) -> list[JobTask]:
        """Return the tasks that are under way or have a running step, in the order of their submission."""
        with self._lock:
            running = [work for _, work in self._running.values() if isinstance(work, JobTask)]
            return list(dict.fromkeys([*self._tasks, *running]))

    # -- turns ---------------------------------------------------------------------------------

    def add(self, work: JobEngine.Steps) -> bool:
        """Queue work; its steps take turns with those of other work. Returns whether a thread can run it."""
        with self._lock:
            queue = self._urgent if work.is_urgent else self._work
            if self._is_closed or not self._rouse():
                return False
            queue.append(work)
            return True

    def run_steps(self, work: JobEngine.Steps) -> None:
        """Run the steps of work in the calling thread, since no thread could start."""
        while True:
            with self._lock:
                step = work.next_step()
            if step is None:
                return
            work.run(step)

    def _rouse(self) -> bool:
        """With the lock: wake or start a thread for a step. Returns whether there are any threads."""
        if self._num_idle:
            self._has_work.notify()
        else:
            late = time.monotonic() - self._stuck_s
            num_stuck = sum(since < late for since, _ in self._running.values())
            if len(self._threads) < self._num_threads + min(num_stuck, self._num_threads):
                try:
                    self._threads.append(self._started(self._run_steps, str(len(self._threads))))
                except RuntimeError as e:
                    self._log_no_thread(e)
        return bool(self._threads)

    def _started(self, target: Callable[[], None], suffix: str) -> BackgroundThread:
        thread = BackgroundThread(target, name=f"kvplug-{self._name}-{suffix}", stop=self._stop)
        thread.start()
        return thread

    def _log_no_thread(self, error: RuntimeError) -> None:
        level = logging.DEBUG if ExitGuard.is_leaving() else logging.WARNING
        _log.log(level, "the store %r needs another thread: %s", self._name, error)

    def _run_steps(self) -> None:
        while (taken := self._next_step()) is not None:
            work, step = taken
            try:
                work.run(step)
            except Exception:  # the thread must live on to serve other work
                _log.exception("a step of the store %r failed: a fault of kvplug", self._name)
            del work, taken  # an idle thread must not keep a caller's memory alive

    def _next_step(self) -> tuple[JobEngine.Steps, int] | None:
        me = threading.current_thread()
        with self._lock:
            self._running.pop(me, None)
            while (taken := self._take()) is None:
                if self._is_closed:
                    return None
                self._num_idle += 1
                self._has_work.wait()
                self._num_idle -= 1
            self._running[me] = time.monotonic(), taken[0]
            if self._urgent or self._work:
                self._rouse()
            return taken

    def _take(self) -> tuple[JobEngine.Steps, int] | None:
        for queue in (self._urgent, self._work):
            while queue:
                work = queue.popleft()
                step = work.next_step()
                if step is not None:
                    if work.has_steps():
                        queue.append(work)
                    return work, step
        return None

    # -- time ----------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], object]) -> JobEngine.Alarm:
        """Schedule a call, which must not block, for a time of the monotonic clock (``math.inf``: never).

        After :meth:`give_up`, calls are made only while a task is under way.

        Raises:
            RuntimeError: this process cannot start another thread.
        """
        alarm = JobEngine.Alarm(self, call)
        with self._lock:
            if when == math.inf or (self._is_closed and not self._tasks):
                return alarm
            if self._clock is None:
                self._clock = self._started(self._keep_time, "clock")
            if self._num_cancelled > _MANY and self._num_cancelled > len(self._alarms) // 2:
                self._alarms = [each for each in self._alarms if each[2].call is not None]
                heapq.heapify(self._alarms)
                self._num_cancelled = 0
            is_earliest = not self._alarms or when < self._alarms[0][0]
            heapq.heappush(self._alarms, (when, next(self._numbers), alarm))
            if is_earliest:
                self._has_alarm.notify()
        return alarm

    def _keep_time(self) -> None:
        while True:
            with self._lock:
                if self._is_closed and not self._tasks:
                    self._clock = None
                    self._alarms.clear()
                    return
                left = self._alarms[0][0] - time.monotonic() if self._alarms else None
                if left is None or left > 0:
                    self._has_alarm.wait(None if left is None else min(left, 1e6))
                    continue
                alarm = heapq.heappop(self._alarms)[2]
            call, alarm.call = alarm.call, None
            if call is None:
                continue
            try:
                call()
            except Exception:  # the other calls must still be made in time
                _log.exception("a scheduled call of the store %r failed", self._name)
            del call
            with self._lock:
                if self._urgent or self._work:
                    self._rouse()  # steps may be stuck

    # -- the end -------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Refuse new jobs, end all jobs but puts, and wait for the puts until the deadline. Idempotent."""
        with self._lock:
            self.is_closing = True
            others = [task for task in self._tasks if not task.is_put]
        for task in others:
            task.end(MissReason.CLOSED)
        with self._lock:
            self._has_ended.wait_for(
                lambda: self._is_closed or all(task.is_over or not task.is_put for task in self._tasks),
                deadline.remaining(),
            )

    def give_up(self, reason: MissReason = MissReason.CLOSED) -> bool:
        """End every job, and then the threads. Does not wait. Returns whether this was the first call."""
        with self._lock:
            is_first = not self._is_closed
            self.is_closing = self._is_closed = True
            tasks = list(self._tasks)
        for task in tasks:
            task.end(reason)
        with self._lock:
            for each in (self._has_work, self._has_alarm, self._has_ended):
                each.notify_all()
        return is_first

    def join(self, deadline: Deadline) -> None:
        """Wait for the threads to end, after :meth:`give_up`."""
        with self._lock:
            threads = [*self._threads, *filter(None, (self._clock,))]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())

    def _after_fork_in_child(self) -> None:
        self.is_closing = self._is_closed = True
        for task in self._tasks:  # not removed: a child must not free memory that a device uses
            task.after_fork()


class JobTask(JobEngine.Steps):
    """The steps of one job, which may run in several threads at once."""

    class OverError(Exception):
        """The job ended before the copy began."""

    UNKNOWN: ClassVar[object] = object()
    """The result of a page that has no result yet."""

    is_put: bool = False
    """Whether the engine's ``close`` waits for it."""

    def __init__(self, job: Job[Any], num_steps: int | None) -> None:
        """``num_steps``: after how many steps the job ends; ``None`` if no step ends it."""
        self.job = job
        """The job that the task works for."""
        self.results: list[Any] = [JobTask.UNKNOWN] * job.count
        """The results so far, in the order of the keys."""
        self.lock = threading.RLock()
        """Held while results change and while the job ends."""
        self.is_over = False
        """Whether the job has ended."""
        self._num_steps = num_steps
        self._begun = self._ended = self._copies = 0
        self._engine: JobEngine | None = None
        self._alarm: JobEngine.Alarm | None = None

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
            reason = self.attempt(step)
        except Exception:
            _log.exception("%r failed: a fault of kvplug", self.job)
            reason = MissReason.OTHER
        self.step_ended(reason)

    def step_ended(self, reason: MissReason | None) -> None:
        """Note that a step has ended. ``reason``: why the step makes the job fail, if it does."""
        with self.lock:
            self._ended += 1
            is_finished = self.is_finished()
        if reason is not None or is_finished:
            self.end(reason)

    def attempt(self, step: int) -> MissReason | None:
        """Run the step. Returns why it makes the job fail, or ``None`` if it does not."""
        try:
            self.do(step)
        except JobTask.OverError:
            pass
        except MemoryError:
            return MissReason.NO_MEMORY
        except CopyError as e:
            _log.error("the memory of %r cannot be used: %s", self.job, in_words(e.__cause__))
            return MissReason.OTHER
        return None

    def do(self, step: int) -> None:
        """Do the work of the step. The default does nothing, for jobs that no step ends.

        Raises:
            JobTask.OverError: the job has ended.
            CopyError, MemoryError: as :meth:`copying`.
        """

    def is_finished(self) -> bool:
        """With the lock: whether all steps have ended, so that the job ends."""
        return self._ended == self._num_steps

    def note(self, index: int, result: Any) -> None:
        """Record the result of one page, unless the job is over."""
        with self.lock:
            if not self.is_over:
                self.results[index] = result

    @contextmanager
    def copying(self) -> Iterator[None]:
        """A context for a copy from or into the caller's memory.

        Raises:
            JobTask.OverError: the job has ended, and its memory must not be touched.
            CopyError: the memory cannot be used.
            MemoryError: there is no memory for intermediate copies.
        """
        with self.lock:
            if self.is_over:
                raise JobTask.OverError
            self._copies += 1
        try:
            yield
        except MemoryError:
            raise
        except Exception as e:
            raise CopyError(e) from e
        finally:
            if self._copied():
                self.settled()
                self.job.settle()

    def _copied(self) -> bool:
        """Note that a copy has ended. Returns whether the job settles now."""
        with self.lock:
            self._copies -= 1
            return self.is_over and not self._copies

    # -- the end -------------------------------------------------------------------------------

    def end(self, reason: MissReason | None) -> bool:
        """End the job for this reason, or with ``None`` if every page has a result. Returns whether this call
        ended it."""
        with self.lock:
            if self.is_over:
                return False
            self.is_over = True
            results = self.final(reason)
            self.job.failure = reason
            is_settled = not self._copies
        if self._alarm is not None:
            self._alarm.cancel()
        if is_settled:
            self.settled()
        self.job.set(results, settled=is_settled)
        self.ended()
        return True

    def final(self, reason: MissReason | None) -> list[Any]:
        """With the lock: return the results of a job that ends for this reason."""
        left = self.result_for(reason)
        return [left if each is JobTask.UNKNOWN else each for each in self.results]

    def result_for(self, reason: MissReason | None) -> Any:
        """Return the result to give a page without one when the job ends for this reason."""
        return reason

    def settled(self) -> None:
        """Called once, before the job settles: the job is over, and no copy is under way."""

    def ended(self) -> None:
        """Called once, when the job is done. Notifies the engine."""
        if self._engine is not None:
            self._engine.note_end(self)

    def after_fork(self) -> None:
        """In a forked child: end the job, which belongs to the parent."""
        self.lock = threading.RLock()
        self.is_over = True
        self.job.after_fork(self.final(MissReason.CLOSED))


def in_words(error: BaseException | None) -> str:
    """Return the error's class and text."""
    return f"{type(error).__name__}: {error}" if error is not None else "unknown"
