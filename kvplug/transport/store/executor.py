"""Makes a :class:`Store` from a :class:`BlockingStore`: verifies pages, and interprets failed calls.

Steps of tasks in the job engine call the blocking store. They read a page into memory of the thread, so a
call that returns after its job's deadline does not touch the caller's memory. The page is verified while it
is copied to the caller's memory; a wrong page is a miss.

A call that does not return blocks its thread. Other threads, up to a limit, run the jobs meanwhile; beyond
it, jobs end by their deadlines. A call whose error means that the store is gone (see ``page_calls``) ends its
job. Requests then end at once as misses until the back-off is over and one is tried again. An error of one
page makes that page a miss.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvplug.errors import CapacityError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.log import LogEvent
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
_ALIGNMENT: Final = 64
"""The payload of each page of a batch begins at a multiple of this, so that its elements are aligned."""
_CLOSE_S: Final = 5.0
"""How long ``close`` waits for calls under way after the jobs have ended."""


class ExecutedStore(Store):
    """The store that an executor makes from a blocking one."""

    def __init__(
        self,
        store: BlockingStore,
        *,
        name: str,
        seal: PageSeal,
        timeout_s: float = 30.0,
    ) -> None:
        """Take ownership of ``store``.

        Args:
            name: the store's name, for messages and threads.
            seal: how pages are protected.
            timeout_s: the default deadline of a job.
        """
        self.seal = seal
        self._store = store
        self.calls = PageCalls(store, name)
        self.name = name
        """The store's name, for messages."""
        self._timeout_s = timeout_s
        self._num_threads = max(1, store.num_threads)
        self._jobs = JobEngine(name, self._num_threads, stuck_s=timeout_s)
        self._lock = threading.Lock()
        """Protects the attributes below."""
        self._num_failed = 0
        """Failures in a row."""
        self._failed_at = self._retry_at = 0.0

    def __repr__(self) -> str:
        return f"<store {self.name!r}{', closed' if self._jobs.is_closing else ''}>"

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

    def pages_per_call(self, count: int, nbytes: int) -> int:
        """Return how many pages one call moves if all threads share ``count`` pages of ``nbytes`` bytes."""
        return max(1, min(self._store.batch_bytes // nbytes, -(-count // self._num_threads)))

    def _submit(self, task: StoreTask) -> None:
        self._jobs.check_open()
        if time.monotonic() < self._retry_at and not task.is_finished():
            task.end(MissReason.STORE_GONE)
        else:
            self._jobs.submit(task)

    def note_call(self, reason: MissReason | None, error: BaseException | None, began: float) -> None:
        """Record whether the store can be reached, judging by the outcome of a call.

        Args:
            reason: why the job fails, if it does.
            began: when the call began, by ``time.monotonic``.
        """
        with self._lock:
            if reason is MissReason.STORE_GONE:
                if began < self._failed_at:
                    return  # the call was under way when another one failed
                if not self._num_failed and not ExitGuard.is_leaving():
                    why = in_words(error)
                    text = f"the store {self.name!r} failed and will be retried: {why}"
                    LogEvent.STORE_FAILED.log(_log, text, store=self.name, error=why)
                self._failed_at = time.monotonic()
                if self._num_failed:
                    pause = min(_BACKOFF_S[0] * 2 ** (self._num_failed - 1), _BACKOFF_S[1])
                    self._retry_at = self._failed_at + pause
                self._num_failed = min(self._num_failed + 1, 16)
            elif reason is None and self._num_failed:
                self._num_failed, self._retry_at = 0, 0.0
                LogEvent.STORE_ANSWERS.log(_log, f"the store {self.name!r} answers again", store=self.name)

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
            _log.warning("closing the store %r failed: %s", self.name, in_words(e))


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
    """A removal. Writes of the same pages that were under way before it must be undone before it is done."""

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
        return not self.is_over and not self._begun  # other steps undo writes, in a put's thread

    def await_write(self) -> None:
        """Note that a write of one of the pages is under way. :meth:`undo` must be called when it ends."""
        with self.lock:
            self._num_steps = (self._num_steps or 0) + 1

    def undo(self, key: bytes) -> None:
        """Remove a page whose write was under way. This step runs in the put's thread."""
        try:
            is_removed = self.store.calls.remove((key,))[0]
        except Exception as e:
            _log.debug("a page that was removed while it was written may still be there: %s", e)
            is_removed = False
        self.step_ended(None if is_removed else MissReason.STORE_GONE)

    def final(self, reason: MissReason | None) -> list[bool]:
        return [reason is None and each is True for each in self.results]


class PageTask(StoreTask):
    """A task that copies each page, and calls the store for one page or for several at once."""

    def __init__(self, store: ExecutedStore, job: Job[Any], pages: PageRequest) -> None:
        self._per_call = store.pages_per_call(job.count, pages.series.format.nbytes)
        super().__init__(store, job, -(-job.count // self._per_call))
        self._calls, self._seal = store.calls, store.seal
        self._pages = pages
        self._copy: PageCopy | None = None

    def do(self, step: int) -> None:
        begin = step * self._per_call
        indices: Sequence[int] = range(begin, min(begin + self._per_call, self.job.count))
        if len(indices) > 1:
            indices = self.do_several(indices)
        for index in indices:
            if self.is_over:
                return
            self.do_one(index)

    @abc.abstractmethod
    def do_several(self, indices: Sequence[int]) -> Sequence[int]:
        """Do the work of several pages with one call. Returns the pages that need calls of their own."""

    @abc.abstractmethod
    def do_one(self, index: int) -> None:
        """Do the work of one page with a call of its own."""

    def _copy_of(self, index: int, payload: memoryview, headers: Sequence[memoryview] = ()) -> PageCopy:
        """Return a copier between the caller's memory and ``payload``, which holds one page."""
        copy = self._copy
        if copy is None:  # two threads may make one each
            copy = self._copy = PageCopy(self._pages.memory, self._seal)
        copy.use(index, PageRows.dense(payload, 1, len(payload)), headers)
        return copy


class GetTask(PageTask):
    """Reads each page into memory of the thread, verifies it, and copies it into the caller's memory."""

    job: GetJob

    def do_several(self, indices: Sequence[int]) -> Sequence[int]:
        into = [self._buffers(index) for index in indices]
        keys = [self._pages.keys[index] for index in indices]
        left = dict.fromkeys(range(len(indices)))
        with contextlib.closing(self._calls.read_pages(keys, into)) as found:
            for at, length in found:
                if self.is_over:
                    return ()
                if length is not None:
                    self._got(indices[at], into[at], length)
                    del left[at]
        absent = self._calls.are_absent([keys[at] for at in left])
        for at, is_absent in zip([*left], absent, strict=True):
            if is_absent:
                self._got(indices[at], into[at], None)
                del left[at]
        return [indices[at] for at in left]

    def do_one(self, index: int) -> None:
        buffers = self._buffers(index)
        try:
            length = self._calls.read(self._pages.keys[index], buffers)
        except BlockingStore.PageError as e:
            _log.debug("a page is missed: %s", e)
            self.note(index, e.reason)
            return
        self._got(index, buffers, length)

    def _buffers(self, index: int) -> tuple[memoryview, memoryview]:
        """Return this thread's memory for the header and the payload of a page; all pages use the same."""
        nbytes = self._pages.series.format.nbytes
        header_length = self._seal.header_length(self._pages.series.format, self._pages.identities[index])
        # the payload comes first, where the memory is aligned for its elements
        whole = _scratch_memory(nbytes + header_length)
        return whole[nbytes:], whole[:nbytes]

    def _got(self, index: int, buffers: tuple[memoryview, memoryview], length: int | None) -> None:
        """Verify the page in the buffers, and copy it to the caller's memory.

        Args:
            length: the length of the whole page; ``None`` if it is absent.
        """
        pages, seal = self._pages, self._seal
        header, payload = buffers
        whole = len(header) + len(payload)
        series, identity = pages.series, pages.identities[index]
        reason: MissReason | None
        if length is None:
            reason = MissReason.ABSENT
        elif length != whole:
            reason = seal.check_header(series, identity, header[:length]) or MissReason.CORRUPT
        else:
            reason = seal.check_header(series, identity, header) or seal.check_proof(header, payload)
        if reason is None:
            with self.copying():
                found = self._copy_of(index, payload, (header,)).load(range(index, index + 1))
            reason = None if found is None else found[0]
        if reason is not None and reason is not MissReason.ABSENT:
            self._discard(pages.keys[index], reason, whole)
        self.note(index, reason)
        self.job.advance()

    def _discard(self, key: bytes, reason: MissReason, nbytes: int) -> None:
        """Remove a wrong page, since the store would not keep the correct one while its key is taken.

        A key is a hash over the format and all tokens, so another format or identity under it is also an
        accident, such as a flipped bit in the header.
        """
        is_removed = self._calls.remove((key,))[0]
        if not is_removed:
            self._calls.is_unreadable(key, nbytes)
        what = "was removed" if is_removed else "cannot be removed, and counts as absent from now on"
        text = f"the store {self.store.name!r} returned a wrong page ({reason}), which {what}"
        LogEvent.WRONG_PAGE.log(_log, text, store=self.store.name, reason=reason)


class PutTask(PageTask):
    """Copies each page out of the caller's memory and writes it, unless a removal comes first."""

    is_put = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._forgotten: set[int] = set()
        """Pages that were removed before they were written."""
        self._writing: dict[int, list[RemoveTask]] = {}
        """For each page that is being written, the removals of it that have come since the write began."""

    def do_several(self, indices: Sequence[int]) -> Sequence[int]:
        nbytes = self._pages.series.format.nbytes
        stride = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = _scratch_memory(stride * len(indices))
        pages = {}
        for at, index in enumerate(indices):
            pages[index] = self._copied_out(index, memory[at * stride :][:nbytes])
        pages = {index: page for index, page in pages.items() if self._begins_write(index)}
        kept: Sequence[bool] | None = None
        try:
            kept = self._calls.write_pages([self._pages.keys[index] for index in pages], [*pages.values()])
        finally:
            for at, index in enumerate(pages):
                result = JobTask.UNKNOWN if kept is None else None if kept[at] else PutReason.NO_ROOM
                self._write_ended(index, result)
        return tuple(index for index in pages if self.results[index] is JobTask.UNKNOWN)

    def do_one(self, index: int) -> None:
        page = self._copied_out(index, _scratch_memory(self._pages.series.format.nbytes))
        if not self._begins_write(index):
            return
        result: Any = JobTask.UNKNOWN  # a failed write gets the reason of the whole request
        try:
            result = self._written(self._pages.keys[index], page)
        finally:
            self._write_ended(index, result)

    def _copied_out(self, index: int, payload: memoryview) -> tuple[memoryview, memoryview]:
        """Copy one of the caller's pages to ``payload``. Returns its header and ``payload``."""
        with self.copying():
            (checksums,) = self._copy_of(index, payload).save(range(index, index + 1))
        pages = self._pages
        header = self._seal.header(pages.series, pages.identities[index], payload, checksums)
        return memoryview(header), payload

    def _begins_write(self, index: int) -> bool:
        """Note that a page is being written. Returns false if it was removed before."""
        with self.lock:
            if index in self._forgotten:
                self.note(index, PutReason.CANCELLED)
                return False
            self._writing[index] = []
        return True

    def _write_ended(self, index: int, result: Any) -> None:
        with self.lock:
            removals = self._writing.pop(index)
            if removals or result is not JobTask.UNKNOWN:
                self.note(index, PutReason.CANCELLED if removals else result)
        for removal in removals:
            removal.undo(self._pages.keys[index])

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
        """Skip removed pages that are not written yet. The removal undoes the writes that are under way."""
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
