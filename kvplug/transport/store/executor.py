"""Makes a :class:`Store` of a :class:`BlockingStore`: threads, deadlines, verification, back-off.

Calls of the blocking store run in a few threads. Jobs take turns page by page, so that a long one does not
hold up the others; lookups go first. A page is read into memory of the thread, and verified while it is
copied from there to the caller: a wrong one is a miss, whatever its memory then holds. So a call that returns
after its job's deadline touches nothing of the caller's. A job whose deadline comes during such a copy is
done, and settled when the copy has ended.

A call that does not return holds its thread. The jobs go on in another one, up to a bound; then they end by
their deadlines. A call whose error means that the store is gone (see ``page_calls``) ends
its job; requests end at once, as misses, until the back-off is over and one of them is tried again. An error
about one page is a miss of that page.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvplug.errors import ClosedError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread, ExitGuard
from kvplug.transport.store.blocking import BlockingStore, PageError
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.keys import Series
from kvplug.transport.store.page_calls import PageCalls, in_words
from kvplug.transport.store.results import MissReason, Presence, PutReason, Usage
from kvplug.transport.store.store import PageRequest, Store
from kvplug.transport.store.tasks import (
    CopyError,
    GetTask,
    LookupTask,
    PutTask,
    RemoveTask,
    Scratch,
    Task,
    TouchTask,
)

_log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.1, 5.0)
"""After the second failure in a row, and at most; doubled each time. After the first one, the next request is
tried at once: a connection may have been lost, and the store be there."""
_CLOSE_S: Final = 5.0
"""How long ``close`` waits for calls under way, after its jobs have ended."""


class ExecutedStore(Store):
    """The store that an executor makes of a blocking one."""

    def __init__(
        self,
        store: BlockingStore,
        *,
        name: str,
        seal: PageSeal,
        timeout_s: float = 30.0,
        num_threads: int | None = None,
    ) -> None:
        """Owns ``store`` from here on.

        Args:
            name: of the store, for messages and threads.
            seal: how pages are protected.
            timeout_s: the default deadline of a job.
            num_threads: calls at the same time; default: what the store says.
        """
        self.seal = seal
        self._store = store
        self._calls = PageCalls(store, name)
        self._name = name
        self._timeout_s = timeout_s
        self._num_threads = max(1, store.num_threads if num_threads is None else num_threads)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._urgent: deque[Task] = deque()
        self._tasks: deque[Task] = deque()
        self._live: set[Task] = set()
        self._puts = 0
        self._busy: dict[threading.Thread, tuple[float, Task]] = {}
        """Threads inside a call, since when, and the task; which may be over."""
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._due: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()
        self._clock: threading.Thread | None = None
        self._closing = self._closed = False
        self._num_failed = 0
        """Failures in a row."""
        self._failed_at = self._retry_at = 0.0
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<store {self._name!r}{', closed' if self._closed else ''}>"

    @property
    def is_shared(self) -> bool:
        return self._store.is_shared

    @property
    def medium(self) -> str:
        return self._store.medium

    @property
    def location(self) -> str:
        return self._store.location

    # -- jobs ----------------------------------------------------------------------------------

    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._submit(LookupTask(self._calls, job, tuple(keys)), urgent=True)
        return job

    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._submit(PutTask(self._calls, self.seal, job, pages))
        return job

    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._submit(GetTask(self._calls, self.seal, job, pages))
        return job

    def submit_remove(self, keys: Sequence[bytes] | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        self._check_open()
        if keys is None and type(self._store).clear is BlockingStore.clear:
            self._store.clear()  # raises UnsupportedError
        job: Job[bool] = Job(1 if keys is None else len(keys), self._deadline(timeout))
        task = RemoveTask(self._calls, job, None if keys is None else tuple(keys), self._undone)
        with self._lock:
            for put in {*self._live, *(task for _, task in self._busy.values())}:
                if isinstance(put, PutTask):
                    put.forget(task)
        self._submit(task, urgent=True)
        return job

    def _undone(self, task: RemoveTask, reason: MissReason | None) -> None:
        """A write that was under way when its page was removed has ended, and was undone."""
        with self._lock:
            task.num_under_way -= 1
            finished = task.is_finished()
        if reason is not None or finished:
            self._end(task, reason)

    def touch(self, keys: Sequence[bytes]) -> None:
        job: Job[bool] = Job(0, self._deadline(DEFAULT_TIMEOUT))
        self._submit(TouchTask(self._calls, job, tuple(keys)))

    def keys(self, series: Series) -> Sequence[bytes]:
        self._check_open()
        return self._store.keys(series.id)

    def usage(self) -> Usage:
        self._check_open()
        return self._store.usage()

    # -- scheduling ----------------------------------------------------------------------------

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def _check_open(self) -> None:
        if self._closing or self._closed:
            ExitGuard.hold()
            raise ClosedError(f"the store {self._name!r} is closed")

    def _submit(self, task: Task, *, urgent: bool = False) -> None:
        self._check_open()
        if task.num_calls == 0:
            task.end(None)
            return
        task.job.on_cancel(lambda: self._end(task, MissReason.CANCELLED))
        with self._lock:
            refused: MissReason | None = None
            if self._closing:
                refused = MissReason.CLOSED
            elif time.monotonic() < self._retry_at or not self._is_staffed():
                refused = MissReason.STORE_GONE
            else:
                self._live.add(task)
                self._puts += isinstance(task, PutTask)
                (self._urgent if urgent else self._tasks).append(task)
                heapq.heappush(self._due, (task.job.deadline.at, next(self._numbers), task))
                self._changed.notify_all()
        if refused is not None:
            task.end(refused)

    def _is_staffed(self) -> bool:
        """With the lock: whether there is a thread for one more call, and one that keeps the deadlines."""
        if self._clock is None:
            self._clock = self._started(self._keep_deadlines, "-clock")
        late = time.monotonic() - self._timeout_s
        stuck = sum(since < late for since, _ in self._busy.values())
        room = self._num_threads + min(stuck, self._num_threads) - len(self._threads)
        if not self._idle and room > 0 and (thread := self._started(self._work)) is not None:
            self._threads.add(thread)
        return bool(self._threads) and self._clock is not None

    def _started(self, target: Callable[[], None], suffix: str = "") -> threading.Thread | None:
        thread = BackgroundThread(target, name=f"kvplug-{self._name}{suffix}", stop=self._give_up)
        try:
            thread.start()
        except RuntimeError as e:
            level = logging.DEBUG if ExitGuard.is_leaving() else logging.WARNING
            _log.log(level, "the store %r needs another thread: %s", self._name, e)
            return None
        return thread

    def _work(self) -> None:
        me, scratch = threading.current_thread(), Scratch()
        while (taken := self._next_call(me)) is not None:
            task, call = taken
            reason: MissReason | None = None
            error: BaseException | None = None
            try:
                task.run(call, scratch)
            except MemoryError as e:
                reason, error = MissReason.NO_MEMORY, e
            except CopyError as e:
                reason = MissReason.OTHER
                _log.error("the memory of %r cannot be used: %s", task.job, in_words(e.__cause__))
            except PageError as e:
                reason, error = e.reason, e
            except Exception as e:
                reason, error = MissReason.STORE_GONE, e
            with self._lock:
                self._note(reason, error, began=self._busy.pop(me)[0])
                task.num_done += 1
                finished = task.is_finished()
                if reason is not None:
                    task.next_call = task.num_calls  # no further call of it is begun
            if reason is not None or finished:
                self._end(task, reason)

    def _next_call(self, me: threading.Thread) -> tuple[Task, int] | None:
        with self._lock:
            while (taken := self._take()) is None:
                if self._closed:
                    self._threads.discard(me)
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            self._busy[me] = time.monotonic(), taken[0]
            if self._urgent or self._tasks:
                self._is_staffed()
            return taken

    def _take(self) -> tuple[Task, int] | None:
        """With the lock: the next call. Jobs take turns; a job that has ended or failed has none left."""
        for tasks in (self._urgent, self._tasks):
            while tasks:
                task = tasks.popleft()
                if task not in self._live or task.next_call >= task.num_calls:
                    continue
                call = task.next_call
                task.next_call += 1
                if task.next_call < task.num_calls:
                    tasks.append(task)
                return task, call
        return None

    def _note(self, reason: MissReason | None, error: BaseException | None, began: float) -> None:
        """With the lock: whether the store is there, by what a call of it came to."""
        if reason is MissReason.STORE_GONE:
            if began < self._failed_at:
                return  # it was under way when another one failed
            if not self._num_failed and not ExitGuard.is_leaving():
                _log.warning("the store %r failed, and is tried again: %s", self._name, in_words(error))
            self._failed_at = time.monotonic()
            if self._num_failed:
                pause = min(_BACKOFF_S[0] * 2 ** (self._num_failed - 1), _BACKOFF_S[1])
                self._retry_at = self._failed_at + pause
            self._num_failed = min(self._num_failed + 1, 16)
        elif reason is None and self._num_failed:
            self._num_failed, self._retry_at = 0, 0.0
            _log.info("the store %r answers again", self._name)

    def _end(self, task: Task, reason: MissReason | None) -> None:
        if not task.end(reason):
            return
        with self._lock:
            if task in self._live:
                self._live.discard(task)
                self._puts -= isinstance(task, PutTask)
                self._changed.notify_all()

    def _keep_deadlines(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                late = []
                while self._due and (self._due[0][0] <= now or self._due[0][2] not in self._live):
                    task = heapq.heappop(self._due)[2]
                    if task in self._live:
                        late.append(task)
                if not late:
                    next_at = self._due[0][0] - now if self._due else None
                    self._changed.wait(None if next_at is None else min(next_at, 1e6))
            for task in late:
                self._end(task, MissReason.TIMEOUT)
            with self._lock:
                if (self._urgent or self._tasks) and not self._closed:
                    self._is_staffed()

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._closing or self._closed

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        with self._lock:
            self._closing = True
            others = [task for task in self._live if not isinstance(task, PutTask)]
        for task in others:
            self._end(task, MissReason.CLOSED)
        with self._lock:
            while self._puts and not self._closed:
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    break
        self.abort()

    def _give_up(self) -> bool:
        """End every job and, after calls under way, the threads. Returns whether it was the first call."""
        with self._lock:
            first = not self._closed
            self._closing = self._closed = True
            live = list(self._live)
            self._changed.notify_all()
        for task in live:
            self._end(task, MissReason.CLOSED)
        with self._lock:
            self._due.clear()  # its tasks keep their callers' memory alive
        return first

    def abort(self) -> None:
        if not self._give_up():
            return
        deadline = Deadline.after(_CLOSE_S)
        with self._lock:
            threads = [*self._threads, *([self._clock] if self._clock else [])]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())
        try:
            self._store.close()
        except Exception as e:
            _log.warning("closing the store %r failed: %s", self._name, in_words(e))

    def _after_fork_in_child(self) -> None:
        self._closing = self._closed = True
        live, self._live = self._live, set()
        for task in live:
            task.is_over = True
            task.job.after_fork(task.failed(MissReason.CLOSED))
