"""Makes a :class:`Store` of a :class:`BlockingStore`: verifies pages, and interprets failed calls.

Calls of the blocking store are the steps of tasks (see ``tasks``) in the job engine. A page is read into
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
from collections.abc import Sequence
from typing import Final

from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.threads import ExitGuard
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.engine import JobEngine, in_words
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.keys import Series
from kvplug.transport.store.page_calls import PageCalls
from kvplug.transport.store.results import MissReason, Presence, PutReason, Usage
from kvplug.transport.store.store import PageRequest, Store
from kvplug.transport.store.tasks import GetTask, KeysTask, PutTask, RemoveTask, StoreTask

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
        self._calls = PageCalls(store, name)
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
            return [Presence.HELD if held else Presence.ABSENT for held in self._calls.has(keys)]

        keys = tuple(keys)
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._submit(KeysTask(job, self._note, found, unknown=Presence.ABSENT, is_urgent=True))
        return job

    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._submit(PutTask(job, self._note, self._calls, self.seal, pages))
        return job

    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._submit(GetTask(job, self._note, self._calls, self.seal, pages))
        return job

    def _remove(self, keys: Sequence[bytes] | None, timeout: Timeout) -> Job[bool]:
        self._jobs.check_open()
        if keys is None and type(self._store).clear is BlockingStore.clear:
            self._store.clear()  # raises UnsupportedError
        job: Job[bool] = Job(1 if keys is None else len(keys), self._deadline(timeout))
        removal = RemoveTask(job, self._note, self._calls, keys)
        for task in self._jobs.tasks():
            if isinstance(task, PutTask):
                task.forget(removal)
        self._submit(removal)
        return job

    def touch(self, keys: Sequence[bytes]) -> None:
        def touch() -> tuple[()]:
            self._calls.touch(keys)
            return ()

        keys = tuple(keys)
        if keys:
            self._submit(KeysTask(Job(0, self._deadline(DEFAULT_TIMEOUT)), self._note, touch))

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

    def _note(self, reason: MissReason | None, error: BaseException | None, began: float) -> None:
        """Note from the outcome of a call whether the store can be reached."""
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
