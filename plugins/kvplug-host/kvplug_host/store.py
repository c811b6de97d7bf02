"""The store "host" in the process that owns its memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvplug import ClosedError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    ExitGuard,
    GetJob,
    Job,
    MissReason,
    PageBuffers,
    PageEvent,
    PageRequest,
    PageSeal,
    Presence,
    PutReason,
    Series,
    Store,
    StoreContext,
    StoreLink,
    Timeout,
    Usage,
    close_after_fork,
)
from kvplug_host.jobs.clock import Clock
from kvplug_host.jobs.get import SlotGet
from kvplug_host.jobs.steps import Steps
from kvplug_host.jobs.workers import Workers
from kvplug_host.options import HostOptions
from kvplug_host.pages.pages import Pages
from kvplug_host.pages.slot_buffers import SlotBuffers
from kvplug_host.pages.slot_put import SlotPut
from kvplug_host.serving.server import Server

_log = logging.getLogger(__name__)

NAME: Final = "host"
HERE: Final = "the owner"
"""The holder of leases and declared pages of this process."""
_CLOSE_S: Final = 5.0
"""How long ``close`` waits for its threads, after its jobs have ended."""
_PAGE: Final = 4096


class HostStore(Store):
    """Pages in shared memory of this process.

    What it knows is answered in the calling thread; copies are made by a few threads, in which jobs take
    turns. Processes of this user on this host read the memory themselves; see :meth:`serve`.
    """

    def __init__(self, context: StoreContext) -> None:
        """Raises CapacityError: there are not enough addresses for its memory."""
        options: HostOptions = context.options if context.options is not None else HostOptions()
        # No proof: pages come only from processes that have proved themselves.
        self.seal = PageSeal(checksums=context.seal.checksums)
        self._timeout_s = context.timeout_s
        self._clock = Clock(NAME, self._give_up)
        shape = _shape(options.size or context.buffer_size, options.segment_bytes)
        self.pages = Pages(*shape, self._clock, native=options.native)
        self._workers = Workers(NAME, options.threads, self._give_up)
        self._server = Server(self.pages, context, options)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._gets: set[Steps] = set()
        self._puts: set[Steps] = set()
        """Those of this process."""
        self._links: set[StoreLink] = set()
        self._closing = self._closed = False
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<store {NAME!r}{', closed' if self._closed else ''}>"

    @property
    def medium(self) -> str:
        return "host"

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def _check_open(self) -> None:
        if self._closing:
            ExitGuard.hold()
            raise ClosedError(f"the store {NAME!r} is closed")

    # -- jobs ----------------------------------------------------------------------------------

    @property
    def route(self) -> str:
        return "in this process"

    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._check_open()
        with self.pages.lock:
            found = self.pages.index.lookup(keys, HERE, lease_s)
        job.set(found)
        return job

    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._check_open()
        entries = self.pages.pin(pages.keys)
        get = SlotGet(
            job,
            pages,
            self.seal,
            discard=lambda index, reason: self.pages.discard(entries[index], reason),
            settled=lambda: self.pages.unpin(entries, HERE, were_used=pages.is_use),
            again=self._workers.add,
            native=self.pages.native,
        )
        get.found(
            self.pages.segments.view,
            [entry.offset if entry else 0 for entry in entries],
            [entry.header_bytes if entry else 0 for entry in entries],
            [entry.payload_bytes if entry else 0 for entry in entries],
        )
        for index, entry in enumerate(entries):
            if entry is None:
                get.miss(index, MissReason.ABSENT)
        self._begin(get, self._gets, lambda ended: get.begin(self._clock, ended), is_needed=any(entries))
        return job

    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._check_open()
        memory = pages.memory
        if isinstance(memory, SlotBuffers):
            if memory.is_put:
                raise ValueError("this memory was put already: it belongs to the store")
            memory.is_put = True
        put = SlotPut(job, pages, self.seal, self.pages)
        self._begin(put, self._puts, lambda ended: self.pages.begin_put(put, ended), is_needed=job.count > 0)
        return job

    def _begin(
        self,
        task: Steps,
        live: set[Steps],
        begin: Callable[[Callable[[Steps], None]], None],
        *,
        is_needed: bool,
    ) -> None:
        """Have the task done by the workers, until its deadline."""

        def ended(task: Steps) -> None:
            with self._lock:
                live.discard(task)
                self._changed.notify_all()

        with self._lock:
            closing = self._closing
            if not closing:
                live.add(task)
        try:
            begin(ended)
        except RuntimeError as e:
            _log.warning("the store %r needs another thread: %s", NAME, e)
            task.end(MissReason.STORE_GONE)
        if closing:
            task.end(MissReason.CLOSED)
        elif not is_needed:
            task.end(None)
        elif not self._workers.add(task):
            task.end(MissReason.STORE_GONE)

    def submit_remove(self, keys: Sequence[bytes] | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        job: Job[bool] = Job(1 if keys is None else len(keys), self._deadline(timeout))
        self._check_open()
        self.pages.remove(keys)
        job.set([True] * job.count)
        return job

    # -- at once -------------------------------------------------------------------------------

    def allocate(self, series: Series, count: int) -> PageBuffers | None:
        self._check_open()
        # How long a page's identity is, is known when it is put: as a rule a chain and token ids of 4 bytes.
        tokens = series.format.page_tokens
        identity = bytes(32 + 4 * tokens if tokens else 128)
        header_bytes = self.seal.header_length(series.format, identity)
        return self.pages.allocate(series.format, count, header_bytes)

    def free(self, memory: PageBuffers) -> None:
        if isinstance(memory, SlotBuffers) and not memory.is_put:
            with self.pages.lock:
                self.pages.give_back(memory.take_all())

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        for_s = self._deadline(timeout).remaining()
        self._check_open()
        self.pages.declare(HERE, series.id, keys, for_s)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        with self.pages.changing() as index:
            index.withdraw(keys, HERE)

    def release(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        with self.pages.lock:
            self.pages.index.release(keys, HERE)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        with self.pages.lock:
            self.pages.index.use(keys)

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        with self.pages.lock:
            self.pages.index.expect_reader(keys, HERE)

    def keys(self, series: Series) -> Sequence[bytes]:
        self._check_open()
        with self.pages.lock:
            return self.pages.index.keys(series.id)

    def usage(self) -> Usage:
        self._check_open()
        return self.pages.usage()

    @property
    def has_events(self) -> bool:
        return True

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        self._check_open()
        return self.pages.subscribe(listener)

    def serve(self, link: StoreLink) -> None:
        with self._lock:
            self._check_open()
            self._links.add(link)
        try:
            self._server.serve(link)
        finally:
            with self._lock:
                self._links.discard(link)

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._closing

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        with self._lock:
            if self._closed:
                return
            self._closing = True
            own = set(self._puts)
            others = [*self._gets, *(put for put in self.pages.puts() if put not in own)]
        for other in others:
            other.end(MissReason.CLOSED)
        with self._lock:
            while self._puts and not self._closed:
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    break
        self.abort()

    def _give_up(self) -> bool:
        """End every job, and have the threads end. Does not wait. Returns whether it was the first call."""
        with self._lock:
            if self._closed:
                return False
            self._closing = self._closed = True
            tasks: list[Any] = [*self._gets, *self._puts, *self.pages.puts()]
            links, self._links = self._links, set()
            self._changed.notify_all()
        for task in tasks:
            task.end(MissReason.CLOSED)
        for link in links:
            link.close()
        self._workers.close()
        self._clock.close()
        return True

    def abort(self) -> None:
        if not self._give_up():
            return
        deadline = Deadline.after(_CLOSE_S)
        self._server.close()
        self.pages.close()
        self._workers.join(deadline)
        self._clock.join(deadline)

    def _after_fork_in_child(self) -> None:
        self._closing = self._closed = True
        tasks = {*self._gets, *self._puts, *self.pages._puts}
        self._gets, self._puts, self._links = set(), set(), set()
        for task in tasks:
            task.after_fork()


def _shape(size: int, segment_bytes: int) -> tuple[int, int]:
    """Number and size of the segments of a store with that budget."""
    nbytes = max(_PAGE, min(segment_bytes, size) // _PAGE * _PAGE)
    return max(1, size // nbytes), nbytes
