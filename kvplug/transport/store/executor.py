"""Makes a :class:`Store` of a :class:`BlockingStore`: threads, deadlines, verification, back-off.

Calls of the blocking store run in a few threads. Jobs take turns page by page, so that a long one does not
hold up the others; lookups go first. Pages are read into memory of the thread, verified there, and only then
copied to the caller. So a call that returns after its job's deadline touches nothing of the caller's.

A call that does not return holds its thread. The jobs go on in another one, up to a bound; then they end by
their deadlines. A call that raises counts as a loss of the store: requests end at once, as misses, until the
back-off is over and one of them is tried again.
"""

from __future__ import annotations

import abc
import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kvplug.errors import CapacityError, ClosedError, UnsupportedError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.keys import Series
from kvplug.transport.store.memory import PageRows
from kvplug.transport.store.results import MissReason, Presence, PutReason, Usage
from kvplug.transport.store.store import PageRequest, Store

_log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.1, 5.0)
"""After the first failure, and at most; doubled each time."""
_CLOSE_S: Final = 5.0
"""How long ``close`` waits for calls under way, after its jobs have ended."""

_AnyJob: TypeAlias = Job[Any]


class _Scratch:
    """Memory of one thread for one page, which is used again for the next: fresh memory costs ten times as
    much."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def take(self, nbytes: int) -> memoryview:
        """So many bytes, of any content. What was taken before is void."""
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        return memoryview(self._memory)[:nbytes]


class _Task(abc.ABC):
    """The calls of one job."""

    def __init__(self, job: _AnyJob, num_calls: int, blank: Any) -> None:
        self.job = job
        self.num_calls = num_calls
        self.next_call = 0
        self.num_done = 0
        self.lock = threading.Lock()
        """Held while the job ends, and while its results or its caller's memory change."""
        self.is_over = False
        self.results: list[Any] = [blank] * job.count

    @abc.abstractmethod
    def run(self, call: int, scratch: _Scratch) -> None:
        """One call of the blocking store and what belongs to it. May raise whatever that raises."""

    @abc.abstractmethod
    def failed(self, reason: MissReason) -> list[Any]:
        """The results of the job when it ends for this reason: what is known, and a reason for the rest."""

    def note(self, call: int, result: Any) -> None:
        """The result of one call."""
        with self.lock:
            if not self.is_over:
                self.results[call] = result

    def end(self, reason: MissReason | None) -> bool:
        """The job is done. Returns whether it was not before. A copy under way is finished first."""
        with self.lock:
            if self.is_over:
                return False
            self.is_over = True
            results = self.results if reason is None else self.failed(reason)
        self.job.set(results)
        return True


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
        self._name = name
        self._timeout_s = timeout_s
        self._num_threads = max(1, store.num_threads if num_threads is None else num_threads)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._urgent: deque[_Task] = deque()
        self._tasks: deque[_Task] = deque()
        self._live: set[_Task] = set()
        self._puts = 0
        self._busy: dict[threading.Thread, float] = {}
        """Threads inside a call, and since when."""
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._due: list[tuple[float, int, _Task]] = []
        self._numbers = itertools.count()
        self._clock: threading.Thread | None = None
        self._closing = self._closed = False
        self._backoff_s = 0.0
        self._retry_at = 0.0
        self._probing = False
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<store {self._name!r}{', closed' if self._closed else ''}>"

    @property
    def is_shared(self) -> bool:
        return self._store.is_shared

    # -- jobs ----------------------------------------------------------------------------------

    def submit_lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._submit(_Lookup(self._store, job, tuple(keys)), urgent=True)
        return job

    def submit_put(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._submit(_Put(self._store, self.seal, job, pages))
        return job

    def submit_get(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._submit(_Get(self._store, self.seal, job, pages))
        return job

    def submit_remove(self, keys: Sequence[bytes] | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        if keys is None and type(self._store).clear is BlockingStore.clear:
            self._store.clear()  # raises UnsupportedError
        job: Job[bool] = Job(1 if keys is None else len(keys), self._deadline(timeout))
        self._submit(_Remove(self._store, job, None if keys is None else tuple(keys)), urgent=True)
        return job

    def touch(self, keys: Sequence[bytes]) -> None:
        job: Job[bool] = Job(0, self._deadline(DEFAULT_TIMEOUT))
        self._submit(_Touch(self._store, job, tuple(keys)))

    def keys(self, series: Series) -> Sequence[bytes]:
        self._check_open()
        return self._store.keys(series.id)

    def usage(self) -> Usage:
        return self._store.usage()

    # -- scheduling ----------------------------------------------------------------------------

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def _check_open(self) -> None:
        if self._closing or self._closed:
            raise ClosedError(f"the store {self._name!r} is closed")

    def _submit(self, task: _Task, *, urgent: bool = False) -> None:
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
                self._puts += isinstance(task, _Put)
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
        stuck = sum(since < late for since in self._busy.values())
        room = self._num_threads + min(stuck, self._num_threads) - len(self._threads)
        if not self._idle and room > 0 and (thread := self._started(self._work)) is not None:
            self._threads.add(thread)
        return bool(self._threads) and self._clock is not None

    def _started(self, target: Callable[[], None], suffix: str = "") -> threading.Thread | None:
        thread = BackgroundThread(target, name=f"kvplug-{self._name}{suffix}", stop=self._give_up)
        try:
            thread.start()
        except RuntimeError as e:
            _log.warning("the store %r needs another thread: %s", self._name, e)
            return None
        return thread

    def _work(self) -> None:
        me, scratch = threading.current_thread(), _Scratch()
        while (taken := self._next_call(me)) is not None:
            task, call = taken
            reason: MissReason | None = None
            error: BaseException | None = None
            try:
                task.run(call, scratch)
            except MemoryError as e:
                reason, error = MissReason.NO_MEMORY, e
            except Exception as e:
                reason, error = MissReason.STORE_GONE, e
            with self._lock:
                del self._busy[me]
                self._note(reason, error)
                task.num_done += 1
                finished = task.num_done == task.num_calls
            if reason is not None or finished:
                self._end(task, reason)

    def _next_call(self, me: threading.Thread) -> tuple[_Task, int] | None:
        with self._lock:
            while (taken := self._take()) is None:
                if self._closed:
                    self._threads.discard(me)
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            self._busy[me] = time.monotonic()
            if self._urgent or self._tasks:
                self._is_staffed()
            return taken

    def _take(self) -> tuple[_Task, int] | None:
        """With the lock: the next call. Jobs take turns; a job that has ended has none left."""
        for tasks in (self._urgent, self._tasks):
            while tasks:
                task = tasks.popleft()
                if task not in self._live:
                    continue
                call = task.next_call
                task.next_call += 1
                if task.next_call < task.num_calls:
                    tasks.append(task)
                return task, call
        return None

    def _note(self, reason: MissReason | None, error: BaseException | None) -> None:
        """With the lock: whether the store is there, by what a call of it came to."""
        if reason is MissReason.STORE_GONE:
            if not self._backoff_s:
                _log.warning("the store %r failed, and is tried again: %s", self._name, _in_words(error))
            self._backoff_s = min(max(2 * self._backoff_s, _BACKOFF_S[0]), _BACKOFF_S[1])
            self._retry_at = time.monotonic() + self._backoff_s
        elif reason is None and self._backoff_s:
            self._backoff_s = self._retry_at = 0.0
            _log.info("the store %r answers again", self._name)

    def _end(self, task: _Task, reason: MissReason | None) -> None:
        if not task.end(reason):
            return
        with self._lock:
            if task in self._live:
                self._live.discard(task)
                self._puts -= isinstance(task, _Put)
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
            others = [task for task in self._live if not isinstance(task, _Put)]
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
            _log.warning("closing the store %r failed: %s", self._name, _in_words(e))

    def _after_fork_in_child(self) -> None:
        self._closing = self._closed = True
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self._changed = threading.Condition(self._lock)
        live, self._live = self._live, set()
        for task in live:
            task.is_over = True
            task.job.after_fork(task.failed(MissReason.CLOSED))


def _in_words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if error is not None else "unknown"


# -- the kinds of tasks ------------------------------------------------------------------------


class _Lookup(_Task):
    def __init__(self, store: BlockingStore, job: _AnyJob, keys: tuple[bytes, ...]) -> None:
        super().__init__(job, 1 if keys else 0, Presence.ABSENT)
        self._store = store
        self._keys = keys

    def run(self, call: int, scratch: _Scratch) -> None:
        found = self._store.has(self._keys)
        for index, held in enumerate(found[: len(self._keys)]):
            self.note(index, Presence.HELD if held else Presence.ABSENT)

    def failed(self, reason: MissReason) -> list[Presence]:
        return self.results


class _Get(_Task):
    job: GetJob

    def __init__(self, store: BlockingStore, seal: PageSeal, job: GetJob, pages: PageRequest) -> None:
        super().__init__(job, job.count, _UNKNOWN)
        self._store = store
        self._seal = seal
        self._pages = pages

    def run(self, call: int, scratch: _Scratch) -> None:
        pages, seal = self._pages, self._seal
        series, key, identity = pages.series, pages.keys[call], pages.identities[call]
        header_length = seal.header_length(series.format, identity)
        whole = scratch.take(header_length + series.format.nbytes)
        header, payload = whole[:header_length], whole[header_length:]
        length = self._store.read(key, (header, payload))
        if length is None:
            reason: MissReason | None = MissReason.ABSENT
        elif length != len(whole):
            header = header[: min(length, header_length)]
            reason = seal.check_header(series, identity, header) or MissReason.CORRUPT
        else:
            reason = seal.check(series, identity, header, payload)
        if reason in (MissReason.CORRUPT, MissReason.FORGED):
            self._discard(key, reason)
        with self.lock:
            if not self.is_over:
                if reason is None:
                    pages.memory.scatter(call, PageRows.dense(payload, 1, len(payload)))
                self.results[call] = reason
        self.job.advance()

    def _discard(self, key: bytes, reason: MissReason | None) -> None:
        """Make room under the key: as long as a wrong page is there, a right one would not be kept."""
        _log.warning("a store returned a wrong page (%s), which is removed", reason)
        with contextlib.suppress(UnsupportedError):
            self._store.remove([key])

    def failed(self, reason: MissReason) -> list[MissReason | None]:
        return [reason if each is _UNKNOWN else each for each in self.results]


class _Put(_Task):
    def __init__(self, store: BlockingStore, seal: PageSeal, job: _AnyJob, pages: PageRequest) -> None:
        super().__init__(job, job.count, _UNKNOWN)
        self._store = store
        self._seal = seal
        self._pages = pages

    def run(self, call: int, scratch: _Scratch) -> None:
        pages, series = self._pages, self._pages.series
        payload = scratch.take(series.format.nbytes)
        with self.lock:
            if self.is_over:
                return
            pages.memory.gather(call, PageRows.dense(payload, 1, len(payload)))
        header = self._seal.header(series, pages.identities[call], payload)
        try:
            kept = self._store.write(pages.keys[call], (memoryview(header), payload))
            self.note(call, None if kept else PutReason.NO_ROOM)
        except CapacityError:
            self.note(call, PutReason.TOO_LARGE)
        except PermissionError:
            self.note(call, PutReason.READ_ONLY)

    def failed(self, reason: MissReason) -> list[PutReason | None]:
        known = _PUT_REASONS.get(reason, PutReason.OTHER)
        return [known if each is _UNKNOWN else each for each in self.results]


class _Remove(_Task):
    def __init__(self, store: BlockingStore, job: _AnyJob, keys: tuple[bytes, ...] | None) -> None:
        super().__init__(job, 1 if job.count else 0, False)
        self._store = store
        self._keys = keys

    def run(self, call: int, scratch: _Scratch) -> None:
        if self._keys is None:
            self._store.clear()
        else:
            self._store.remove(self._keys)
        with self.lock:
            self.results = [True] * self.job.count

    def failed(self, reason: MissReason) -> list[bool]:
        return self.results


class _Touch(_Task):
    def __init__(self, store: BlockingStore, job: _AnyJob, keys: tuple[bytes, ...]) -> None:
        super().__init__(job, 1 if keys else 0, None)
        self._store = store
        self._keys = keys

    def run(self, call: int, scratch: _Scratch) -> None:
        self._store.touch(self._keys)

    def failed(self, reason: MissReason) -> list[Any]:
        return []


_UNKNOWN: Final = object()
_PUT_REASONS: Final = {
    MissReason.TIMEOUT: PutReason.TIMEOUT,
    MissReason.CANCELLED: PutReason.CANCELLED,
    MissReason.STORE_GONE: PutReason.STORE_GONE,
    MissReason.CLOSED: PutReason.CLOSED,
    MissReason.NO_MEMORY: PutReason.NO_ROOM,
}
