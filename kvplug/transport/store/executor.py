"""Makes a :class:`Store` of a :class:`BlockingStore`: verifies pages, and interprets failed calls.

Calls of the blocking store are the steps of tasks in the job engine. A page is read into
memory of the thread, and verified while it is copied to the caller's memory; a wrong page is a miss. So a
call that returns after its job's deadline does not touch the caller's memory.

A call that does not return blocks its thread. Other threads, up to a limit, run the jobs meanwhile; beyond
it, jobs end by their deadlines. A call whose error means that the store is gone (see ``page_calls``) ends its
job. Requests then end at once as misses until the back-off is over and one is tried again. An error about one
page is a miss of that page.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvplug.errors import CapacityError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.threads import ExitGuard
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.copy import PageCopy
from kvplug.transport.store.engine import JobEngine, JobTask, in_words
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.keys import Series
from kvplug.transport.store.memory import PageRows
from kvplug.transport.store.page_calls import PageCalls
from kvplug.transport.store.results import MissReason, Presence, PutReason, Usage
from kvplug.transport.store.store import PageRequest, Store

_log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.1, 5.0)
"""The back-off after the second failure in a row, and its maximum; it doubles each time. After the first
failure the next request is tried at once, since only a connection may have been lost."""
_CLOSE_S: Final = 5.0
"""How long ``close`` waits for calls under way after the jobs have ended."""


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
        """Take ownership of ``store``.

        Args:
            name: the store's name, for messages and threads.
            seal: how pages are protected.
            timeout_s: the default deadline of a job.
            num_threads: calls at the same time; default: the store's ``num_threads``.
        """
        self.seal = seal
        self._store = store
        self.calls = PageCalls(store, name)
        self._name = name
        self._timeout_s = timeout_s
        self._jobs = JobEngine(
            name, max(1, store.num_threads if num_threads is None else num_threads), stuck_s=timeout_s
        )
        self._lock = threading.Lock()
        """Protects the attributes below."""
        self._num_failed = 0
        """Failures in a row."""
        self._failed_at = self._retry_at = 0.0

    def __repr__(self) -> str:
        return f"<store {self._name!r}{', closed' if self._jobs.is_closing else ''}>"

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
        def found() -> list[Presence]:
            return [Presence.HELD if held else Presence.ABSENT for held in self.calls.has(keys)]

        keys = tuple(keys)
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._submit(KeysTask(self, job, found, unknown=Presence.ABSENT, is_urgent=True))
        return job

    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._submit(PutTask(self, job, pages))
        return job

    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._submit(GetTask(self, job, pages))
        return job

    def _remove(self, keys: Sequence[bytes] | None, timeout: Timeout) -> Job[bool]:
        self._jobs.check_open()
        if keys is None and type(self._store).clear is BlockingStore.clear:
            self._store.clear()  # raises UnsupportedError
        job: Job[bool] = Job(1 if keys is None else len(keys), self._deadline(timeout))
        removal = RemoveTask(self, job, keys)
        for task in self._jobs.tasks():
            if isinstance(task, PutTask):
                task.forget(removal)
        self._submit(removal)
        return job

    def touch(self, keys: Sequence[bytes]) -> None:
        def touch() -> tuple[()]:
            self.calls.touch(keys)
            return ()

        keys = tuple(keys)
        if keys:
            self._submit(KeysTask(self, Job(0, self._deadline(DEFAULT_TIMEOUT)), touch))

    def keys(self, series: Series) -> Sequence[bytes]:
        self._jobs.check_open()
        return self._store.keys(series.id)

    def usage(self) -> Usage:
        self._jobs.check_open()
        return self._store.usage()

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def _submit(self, task: StoreTask) -> None:
        self._jobs.check_open()
        if time.monotonic() < self._retry_at and not task.is_finished():
            task.end(MissReason.STORE_GONE)
        else:
            self._jobs.submit(task)

    def note_call(self, reason: MissReason | None, error: BaseException | None, began: float) -> None:
        """Note from the outcome of a call whether the store can be reached.

        Args:
            reason: why the job fails, if it does.
            began: when the call began, by ``time.monotonic``.
        """
        with self._lock:
            if reason is MissReason.STORE_GONE:
                if began < self._failed_at:
                    return  # the call was under way when another one failed
                if not self._num_failed and not ExitGuard.is_leaving():
                    _log.warning("the store %r failed and will be retried: %s", self._name, in_words(error))
                self._failed_at = time.monotonic()
                if self._num_failed:
                    pause = min(_BACKOFF_S[0] * 2 ** (self._num_failed - 1), _BACKOFF_S[1])
                    self._retry_at = self._failed_at + pause
                self._num_failed = min(self._num_failed + 1, 16)
            elif reason is None and self._num_failed:
                self._num_failed, self._retry_at = 0, 0.0
                _log.info("the store %r answers again", self._name)

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._jobs.is_closing

    def _close(self, timeout: Timeout) -> None:
        self._jobs.close(self._deadline(timeout))
        self._abort()

    def _abort(self) -> None:
        if not self._jobs.give_up():
            return
        self._jobs.join(Deadline.after(_CLOSE_S))
        try:
            self._store.close()
        except Exception as e:
            _log.warning("closing the store %r failed: %s", self._name, in_words(e))


# -- tasks ---------------------------------------------------------------------------------------

_scratch = threading.local()


def _scratch_memory(nbytes: int) -> memoryview:
    """Return this thread's uninitialised scratch memory, which its next call reuses. Fresh memory for each
    page would take ten times as long."""
    memory = getattr(_scratch, "memory", b"")
    if len(memory) < nbytes:
        memory = _scratch.memory = bytearray(nbytes)
    return memoryview(memory)[:nbytes]


class StoreTask(JobTask):
    """Calls of a blocking store that belong to one job."""

    def __init__(self, store: ExecutedStore, job: Job[Any], num_calls: int) -> None:
        super().__init__(job, num_calls)
        self.store = store

    def attempt(self, step: int) -> MissReason | None:
        reason: MissReason | None = None
        error: BaseException | None = None
        began = time.monotonic()
        try:
            reason = super().attempt(step)
        except BlockingStore.PageError as e:
            reason, error = e.reason, e
        except Exception as e:
            reason, error = MissReason.STORE_GONE, e
        self.store.note_call(reason, error, began)
        return reason


class KeysTask(StoreTask):
    """One call for all keys."""

    def __init__(
        self,
        store: ExecutedStore,
        job: Job[Any],
        call: Callable[[], Sequence[Any]],
        *,
        unknown: Any = None,
        is_urgent: bool = False,
    ) -> None:
        """
        Args:
            call: returns the results, and may raise whatever the store raises.
            unknown: the result of each key if the call fails.
        """
        super().__init__(store, job, 1)
        self.is_urgent = is_urgent
        self._call = call
        self._unknown = unknown

    def do(self, step: int) -> None:
        for index, result in enumerate(self._call()):
            self.note(index, result)

    def result_for(self, reason: MissReason | None) -> Any:
        return self._unknown


class RemoveTask(KeysTask):
    """A removal. It is done once writes of the same pages that were under way before it are undone."""

    def __init__(self, store: ExecutedStore, job: Job[Any], keys: Sequence[bytes] | None) -> None:
        """``keys``: the pages to remove; ``None``: all."""
        calls = store.calls
        super().__init__(
            store, job, lambda: [calls.clear()] if keys is None else calls.remove(keys), is_urgent=True
        )
        self._keys = None if keys is None else frozenset(keys)

    def concerns(self, key: bytes) -> bool:
        return self._keys is None or key in self._keys

    def has_steps(self) -> bool:
        return not self.is_over and not self._begun  # the others are undone writes

    def await_write(self) -> None:
        """Note that a write of one of the pages is under way, which :meth:`undo` follows."""
        with self.lock:
            self._num_steps = (self._num_steps or 0) + 1

    def undo(self, key: bytes) -> None:
        """Remove a page whose write was under way. Such a step belongs to the put's thread."""
        try:
            is_removed = self.store.calls.remove((key,))[0]
        except Exception as e:
            _log.debug("a page that was removed while it was written may still be there: %s", e)
            is_removed = False
        self.step_ended(None if is_removed else MissReason.STORE_GONE)

    def final(self, reason: MissReason | None) -> list[bool]:
        return [reason is None and each is True for each in self.results]


class PageTask(StoreTask):
    """A task with one call and one copy for each page."""

    def __init__(self, store: ExecutedStore, job: Job[Any], pages: PageRequest) -> None:
        super().__init__(store, job, job.count)
        self._calls, self._seal = store.calls, store.seal
        self._pages = pages
        self._copy: PageCopy | None = None

    def _copy_of(self, index: int, payload: memoryview, headers: Sequence[memoryview] = ()) -> PageCopy:
        """Return the copies between the caller's memory and ``payload``, which holds one page."""
        if self._copy is None:
            self._copy = PageCopy(self._pages.memory, self._seal)
        self._copy.use(index, PageRows.dense(payload, 1, len(payload)), headers)
        return self._copy


class GetTask(PageTask):
    """Reads each page into memory of the thread, verifies it, and copies it to the caller's memory."""

    job: GetJob

    def do(self, step: int) -> None:
        pages, seal = self._pages, self._seal
        series, key, identity = pages.series, pages.keys[step], pages.identities[step]
        header_length = seal.header_length(series.format, identity)
        whole = _scratch_memory(series.format.nbytes + header_length)
        # the payload comes first, where the memory is aligned for its elements
        payload, header = whole[: series.format.nbytes], whole[series.format.nbytes :]
        reason: MissReason | None
        try:
            length = self._calls.read(key, (header, payload))
        except BlockingStore.PageError as e:
            _log.debug("a page is missed: %s", e)
            self.note(step, e.reason)
            return
        if length is None:
            reason = MissReason.ABSENT
        elif length != len(whole):
            header = header[: min(length, header_length)]
            reason = seal.check_header(series, identity, header) or MissReason.CORRUPT
        else:
            reason = seal.check_header(series, identity, header) or seal.check_proof(header, payload)
        if reason is None:
            with self.copying():
                found = self._copy_of(step, payload, (header,)).load(range(step, step + 1))
            reason = None if found is None else found[0]
        if reason is not None and reason is not MissReason.ABSENT:
            self._discard(key, reason, len(whole))
        self.note(step, reason)
        self.job.advance()

    def _discard(self, key: bytes, reason: MissReason, nbytes: int) -> None:
        """Remove a wrong page, since the store would not keep a right one while its key is taken.

        A key is a hash over the format and all tokens, so another format or identity under it is also an
        accident, such as a flipped bit in the header.
        """
        is_removed = self._calls.remove((key,))[0]
        if not is_removed:
            self._calls.is_unreadable(key, nbytes)
        what = "was removed" if is_removed else "cannot be removed, and counts as absent from now on"
        _log.warning("a store returned a wrong page (%s), which %s", reason, what)


class PutTask(PageTask):
    """Copies each page out of the caller's memory and writes it, unless a removal comes first."""

    is_put = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._forgotten: set[int] = set()
        """Pages that were removed before they were written."""
        self._writing: dict[int, list[RemoveTask]] = {}
        """For each page that is being written, its removals since the write began."""

    def do(self, step: int) -> None:
        pages, series = self._pages, self._pages.series
        payload = _scratch_memory(series.format.nbytes)
        with self.copying():
            (checksums,) = self._copy_of(step, payload).save(range(step, step + 1))
        header = self._seal.header(series, pages.identities[step], payload, checksums)
        with self.lock:
            if step in self._forgotten:
                self.note(step, PutReason.CANCELLED)
                return
            self._writing[step] = []
        result: Any = JobTask.UNKNOWN  # a failed write gets the reason of the whole request
        try:
            result = self._written(pages.keys[step], (memoryview(header), payload))
        finally:
            with self.lock:
                removals = self._writing.pop(step)
                if removals or result is not JobTask.UNKNOWN:
                    self.note(step, PutReason.CANCELLED if removals else result)
            for removal in removals:
                removal.undo(pages.keys[step])

    def _written(self, key: bytes, page: Sequence[memoryview]) -> PutReason | None:
        try:
            return None if self._calls.write(key, page) else PutReason.NO_ROOM
        except CapacityError:
            return PutReason.TOO_LARGE
        except PermissionError:
            return PutReason.READ_ONLY
        except BlockingStore.PageError as e:
            _log.debug("a page is not kept: %s", e)
            return PutReason.of(e.reason)

    def forget(self, removal: RemoveTask) -> None:
        """Skip the pages of a removal that are not written yet, and have those being written undone."""
        with self.lock:
            for step, key in enumerate(self._pages.keys):
                if not removal.concerns(key):
                    continue
                if step in self._writing:
                    self._writing[step].append(removal)
                    removal.await_write()
                elif self.results[step] is JobTask.UNKNOWN:
                    self._forgotten.add(step)

    def result_for(self, reason: MissReason | None) -> PutReason | None:
        return None if reason is None else PutReason.of(reason)
