"""The store "host" in the process that owns its memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    GetJob,
    Job,
    JobEngine,
    JobTask,
    MissReason,
    PageBuffers,
    PageEvent,
    PageRequest,
    PageSeal,
    Presence,
    PutReason,
    ReservedPages,
    Series,
    Store,
    Timeout,
    Usage,
    close_after_fork,
)
from kvplug_host.jobs import SlotGet
from kvplug_host.options import HostOptions
from kvplug_host.pages.pages import Pages
from kvplug_host.pages.slot_buffers import SlotBuffers
from kvplug_host.pages.slot_put import SlotPut
from kvplug_host.serving.server import Server

_log = logging.getLogger(__name__)

NAME: Final = "host"
OWNER: Final = "the owner"
"""The holder of leases and declared pages of this process."""
_CLOSE_S: Final = 5.0
"""How long ``close`` waits for its threads, after its jobs have ended."""
_PAGE: Final = 4096


class HostStore(Store):
    """Pages in shared memory of this process.

    Calls that need only the index are answered in the calling thread; copies are made by a few threads, in
    which jobs take turns. Processes of this user on this host read the memory themselves; see :meth:`serve`.
    """

    def __init__(self, context: Store.Context) -> None:
        """Raises CapacityError: there are not enough addresses for its memory."""
        options: HostOptions = context.options if context.options is not None else HostOptions()
        # No proof: pages come only from processes that have proved themselves.
        self.seal = PageSeal(checksums=context.seal.checksums)
        self._timeout_s = context.timeout_s
        self._jobs = JobEngine(NAME, options.threads, stop=self._give_up)
        shape = _shape(options.size or context.buffer_size, options.segment_bytes)
        self.pages = Pages(*shape, self._jobs)
        self._server = Server(self.pages, context, options)
        self._lock = threading.Lock()
        self._links: set[Store.Link] = set()
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<store {NAME!r}{', closed' if self._jobs.is_closing else ''}>"

    @property
    def medium(self) -> str:
        return "host"

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    # -- jobs ----------------------------------------------------------------------------------

    @property
    def _route(self) -> str:
        return "in this process"

    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._jobs.check_open()
        job.set(self.pages.lookup(keys, OWNER, lease_s))
        return job

    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._jobs.check_open()
        get = _PinnedGet(job, pages, self.seal, self.pages)
        if JobTask.UNKNOWN in get.results:
            self._jobs.submit(get)
        else:
            get.end(None)
        return job

    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._jobs.check_open()
        memory = pages.memory
        if isinstance(memory, SlotBuffers):
            if memory.is_put:
                raise ValueError("this memory was put already: it belongs to the store")
            memory.is_put = True
        put = SlotPut(job, pages, self.seal, self.pages)
        self._jobs.submit(put)
        return job

    def _reserve(self, pages: PageRequest, which: range) -> ReservedPages | None:
        import torch

        self._jobs.check_open()
        form, some = pages.series.format, slice(which.start, which.stop)
        longest = max(pages.identities[some], key=len)
        header_bytes = self.seal.header_length(form, longest)
        device = torch.device(pages.memory.device)
        return self.pages.reserve_pinned(form, pages.keys[some], header_bytes, device)

    def _remove(self, keys: Sequence[bytes] | None, timeout: Timeout) -> Job[bool]:
        job: Job[bool] = Job(1 if keys is None else len(keys), self._deadline(timeout))
        self._jobs.check_open()
        self.pages.remove(keys)
        job.set([True] * job.count)
        return job

    # -- at once -------------------------------------------------------------------------------

    def allocate(self, series: Series, count: int) -> PageBuffers | None:
        self._jobs.check_open()
        # How long a page's identity is, is known when it is put: as a rule a chain and token ids of 4 bytes.
        tokens = series.format.page_tokens
        identity = bytes(32 + 4 * tokens if tokens else 128)
        header_bytes = self.seal.header_length(series.format, identity)
        return self.pages.allocate(series.format, count, header_bytes)

    def free(self, memory: PageBuffers) -> None:
        if isinstance(memory, SlotBuffers) and not memory.is_put:
            self.pages.free(memory)

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        for_s = self._deadline(timeout).remaining()
        self._jobs.check_open()
        self.pages.declare(OWNER, series.id, keys, for_s)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self._jobs.check_open()
        self.pages.withdraw(keys, OWNER)

    def release(self, keys: Sequence[bytes]) -> None:
        self._jobs.check_open()
        self.pages.release(keys, OWNER)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._jobs.check_open()
        self.pages.use(keys)

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        self._jobs.check_open()
        self.pages.expect_reader(keys, OWNER)

    def keys(self, series: Series) -> Sequence[bytes]:
        self._jobs.check_open()
        return self.pages.keys(series.id)

    def usage(self) -> Usage:
        self._jobs.check_open()
        return self.pages.usage()

    @property
    def has_events(self) -> bool:
        return True

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        self._jobs.check_open()
        return self.pages.subscribe(listener)

    def serve(self, link: Store.Link) -> None:
        with self._lock:
            self._jobs.check_open()
            self._links.add(link)
        try:
            self._server.serve(link)
        finally:
            with self._lock:
                self._links.discard(link)

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._jobs.is_closing

    def _close(self, timeout: Timeout) -> None:
        self._jobs.close(self._deadline(timeout))
        self._abort()

    def _give_up(self) -> bool:
        """End every job, and have the threads end. Does not wait. Returns whether it was the first call."""
        is_first = self._jobs.give_up()
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.close()
        return is_first

    def _abort(self) -> None:
        if self._give_up():
            self._server.close()
            self.pages.close()
            self._jobs.join(Deadline.after(_CLOSE_S))

    def _after_fork_in_child(self) -> None:
        self._links = set()


class _PinnedGet(SlotGet):
    """A get of this process. It pins the pages when it is made."""

    def __init__(self, job: GetJob, pages: PageRequest, seal: PageSeal, store: Pages) -> None:
        super().__init__(job, pages, seal, again=store.jobs.add)
        self._store = store
        self._entries = store.pin(pages.keys)
        self.found(store.segments.view, self._entries)

    def discard(self, index: int, reason: MissReason) -> None:
        self._store.discard(self._entries[index], reason)

    def settled(self) -> None:
        self._store.unpin(self._entries, OWNER, were_used=self.pages.is_use)


def _shape(size: int, segment_bytes: int) -> tuple[int, int]:
    """Number and size of the segments of a store with that budget."""
    nbytes = max(_PAGE, min(segment_bytes, size) // _PAGE * _PAGE)
    return max(1, size // nbytes), nbytes
