"""The engine of jobs: turns, deadlines, cancelling and settling, in one place for every store.

A :class:`JobTask` does what one job needs, in steps. A :class:`JobEngine` runs the steps of all tasks of a
store in a few threads, in turns, so that a job for a few pages is not held up by one for thousands. Another
thread keeps the deadlines, so a job ends in time whatever the steps wait for.

A task ends once: with its last step, at the deadline, by ``cancel``, or with the engine. If a step copies
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
"""Alarms that were cancelled, from which on they are cleared away."""


class CopyError(Exception):
    """The memory that the caller handed in cannot be used. The store is not to blame."""


class JobEngine:
    """Runs the tasks of one store. Its threads start when there is something for them to do."""

    class Steps(abc.ABC):
        """Something to do in steps, each in any of the engine's threads."""

        is_urgent: bool = False
        """Whether its steps come before those of other work."""

        @abc.abstractmethod
        def next_step(self) -> int | None:
            """Begin another step: its number; ``None``: there is none now. Called under the engine's lock."""

        @abc.abstractmethod
        def has_steps(self) -> bool:
            """Whether :meth:`next_step` would give one. Called under the engine's lock."""

        @abc.abstractmethod
        def run(self, step: int) -> None:
            """Do that step. Must not raise."""

    class Alarm:
        """A call to come. ``cancel`` it when it is not needed; from any thread, at any time."""

        __slots__ = ("_engine", "call")

        def __init__(self, engine: JobEngine, call: Callable[[], object]) -> None:
            self._engine = engine
            self.call: Callable[[], object] | None = call
            """What is called; ``None`` afterwards, or once it is cancelled."""

        def cancel(self) -> None:
            """It is not called, unless it is being called now. Idempotent."""
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
            name: of the store, for messages and threads.
            num_threads: that run steps.
            stop: ends the store, without waiting, when the program leaves; default: :meth:`give_up`.
            stuck_s: a step that takes longer does not count: another thread may run beside it, up to twice
                as many threads in total.
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
        """Those that are under way, in the order of coming."""
        self._running: dict[threading.Thread, tuple[float, JobEngine.Steps]] = {}
        """Threads inside a step, since when, and of what."""
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._clock: threading.Thread | None = None
        self._alarms: list[tuple[float, int, JobEngine.Alarm]] = []
        self._numbers = itertools.count()
        self._num_cancelled = 0
        self.is_closing = False
        """Whether no more jobs are taken."""
        self._is_closed = False
        close_after_fork(self)

    def check_open(self) -> None:
        """Raises ClosedError: no more jobs are taken."""
        if self.is_closing:
            ExitGuard.hold()
            raise ClosedError(f"the store {self._name!r} is closed")

    # -- tasks ---------------------------------------------------------------------------------

    def submit(self, task: JobTask) -> None:
        """Have a job done: :meth:`begin` it, and run its steps."""
        if not self.begin(task):
            return
        if task.is_finished():
            task.end(None)
        elif not self.add(task):
            task.end(MissReason.STORE_GONE)

    def begin(self, task: JobTask) -> bool:
        """From now on the job ends by its deadline, by ``cancel``, or with the engine.

        Returns whether it is under way. Without a thread, it has ended as ``STORE_GONE``; with a closed
        engine, as ``CLOSED``.
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
        elif task.is_over:  # it was ended before
            self.note_end(task)
        return not task.is_over

    def note_end(self, task: JobTask) -> None:
        """The job of the task is done. The engine forgets it unless it is still under way."""
        with self._lock:
            if not task.is_under_way:
                self._tasks.pop(task, None)
            if self.is_closing:
                self._has_ended.notify_all()
                self._has_alarm.notify_all()

    def tasks(self) -> list[JobTask]:
        """Those that are under way, or whose steps are running, in the order of coming."""
        with self._lock:
            running = [work for _, work in self._running.values() if isinstance(work, JobTask)]
            return list(dict.fromkeys([*self._tasks, *running]))

    # -- turns ---------------------------------------------------------------------------------

    def add(self, work: JobEngine.Steps) -> bool:
        """Have its steps run, in turns with those of others. Returns whether there is a thread for it."""
        with self._lock:
            queue = self._urgent if work.is_urgent else self._work
            if self._is_closed or not self._rouse():
                return False
            queue.append(work)
            return True

    def _rouse(self) -> bool:
        """With the lock: wake a thread for a step, or start one. Returns whether there are any."""
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
            except Exception:  # the thread serves other work, too
                _log.exception("a step of the store %r failed: a fault of kvplug", self._name)
            del work, taken  # an idle thread keeps no memory of a caller

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
        """Make the call at that time of the monotonic clock; ``math.inf``: never. It must not block.

        After :meth:`give_up` calls are made only as long as a task is under way.

        Raises:
            RuntimeError: this process can have no more threads.
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
            except Exception:  # the other calls come in time
                _log.exception("a call of the store %r at a given time failed", self._name)
            del call
            with self._lock:
                if self._urgent or self._work:
                    self._rouse()  # steps may be stuck

    # -- the end -------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Take no more jobs, end all but puts, and wait for these until the deadline. Idempotent."""
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
        """End every job, and then the threads. Does not wait. Returns whether it was the first call."""
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
        """After :meth:`give_up`: wait for the threads to end."""
        with self._lock:
            threads = [*self._threads, *filter(None, (self._clock,))]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())

    def _after_fork_in_child(self) -> None:
        self.is_closing = self._is_closed = True
        for task in self._tasks:  # they are kept: a child must not free what a device uses
            task.after_fork()


class JobTask(JobEngine.Steps):
    """The steps of one job, which may run in several threads at once."""

    class OverError(Exception):
        """The job ended before the copy began."""

    UNKNOWN: ClassVar[object] = object()
    """The result of a page about which nothing is known yet."""

    is_put: bool = False
    """Whether the close of its store waits for it."""

    def __init__(self, job: Job[Any], num_steps: int | None) -> None:
        """``num_steps``: the job ends with the last of them; ``None``: its end is not that of a step."""
        self.job = job
        """What it works for."""
        self.results: list[Any] = [JobTask.UNKNOWN] * job.count
        """Those of the keys, in their order, so far."""
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
        with self.lock:
            self._ended += 1
            is_finished = self.is_finished()
        if reason is not None or is_finished:
            self.end(reason)

    def attempt(self, step: int) -> MissReason | None:
        """Do that step. Returns why the job fails with it; ``None``: it does not."""
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
        """Do that step. The default is for jobs whose end is not that of a step.

        Raises:
            JobTask.OverError: the job has ended.
            CopyError, MemoryError: as :meth:`copying`.
        """

    def is_finished(self) -> bool:
        """With the lock: whether the job is done, since all steps have ended."""
        return self._ended == self._num_steps

    def note(self, index: int, result: Any) -> None:
        """The result of one page. It counts unless the job is over."""
        with self.lock:
            if not self.is_over:
                self.results[index] = result

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around a copy from or into the caller's memory.

        Raises:
            JobTask.OverError: the job has ended, and its memory must not be touched.
            CopyError: the memory cannot be used.
            MemoryError: there is no memory to copy through.
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
        """A copy has ended. Returns whether the job settles with it."""
        with self.lock:
            self._copies -= 1
            return self.is_over and not self._copies

    # -- the end -------------------------------------------------------------------------------

    def end(self, reason: MissReason | None) -> bool:
        """The job is done. ``None``: every page has its result. Returns whether it was not over before."""
        with self.lock:
            if self.is_over:
                return False
            self.is_over = True
            results = self.final(reason)
            is_settled = not self.is_copying
        if self._alarm is not None:
            self._alarm.cancel()
        if is_settled:
            self.settled()
        self.job.set(results, settled=is_settled)
        self.ended()
        return True

    @property
    def is_copying(self) -> bool:
        """Whether a copy is under way, with which the job settles."""
        return self._copies > 0

    def final(self, reason: MissReason | None) -> list[Any]:
        """With the lock: the results of the job when it ends for that reason."""
        left = self.result_for(reason)
        return [left if each is JobTask.UNKNOWN else each for each in self.results]

    def result_for(self, reason: MissReason | None) -> Any:
        """The result of a page about which nothing is known when the job ends for that reason."""
        return reason

    def settled(self) -> None:
        """The job is over, and no copy is under way. Called once, before the job settles."""

    @property
    def is_under_way(self) -> bool:
        """Whether the engine still has to look after it: at least until it is over."""
        return not self.is_over

    def ended(self) -> None:
        """The job is done, or what was under way afterwards has ended, too."""
        if self._engine is not None:
            self._engine.note_end(self)

    def after_fork(self) -> None:
        """In a forked child: the job is the parent's, and ends here."""
        self.lock = threading.RLock()
        self.is_over = True
        self.job.after_fork(self.final(MissReason.CLOSED))


def in_words(error: BaseException | None) -> str:
    """The error's class and text."""
    return f"{type(error).__name__}: {error}" if error is not None else "unknown"
