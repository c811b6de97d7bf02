"""The store "host" in the process that owns its memory."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvplug import CapacityError, ClosedError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    GetJob,
    Job,
    MissReason,
    PageBuffers,
    PageEvent,
    PageRemoval,
    PageRequest,
    PageRows,
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
from kvplug_host import copying
from kvplug_host.arena.segments import Segments
from kvplug_host.arena.slots import Slot, SlotTable
from kvplug_host.index import Entry, Holder, Index
from kvplug_host.jobs.clock import Alarm, Clock
from kvplug_host.jobs.get import SlotGet
from kvplug_host.jobs.put import Put
from kvplug_host.jobs.steps import OverError, Steps, runs_of
from kvplug_host.jobs.workers import Workers
from kvplug_host.options import HostOptions
from kvplug_host.slot_buffers import SlotBuffers
from kvplug_host.subscribers import Subscribers

if TYPE_CHECKING:
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
        """Raises CapacityError: there is no memory or no address space for it."""
        options: HostOptions = context.options if context.options is not None else HostOptions()
        # No proof: pages come only from processes that have proved themselves.
        self.seal = PageSeal(checksums=context.seal.checksums)
        self.context = context
        self.options = options
        self._timeout_s = context.timeout_s
        count, nbytes = _shape(options.size or context.buffer_size, options.segment_bytes)
        self._segments = Segments(count, nbytes)
        self._slots = SlotTable(count, nbytes, self._segments.grow)
        self._index = Index(self._slots, self._segments.clear_generation, time.monotonic)
        self._lock = threading.RLock()
        """For everything below, and what is above."""
        self._changed = threading.Condition(self._lock)
        self._gets: set[Steps] = set()
        self._puts: set[Put] = set()
        self._arrivals: set[Put] = set()
        """Puts of other processes."""
        self._abandoned: deque[list[Slot | None]] = deque()
        self._subscribers = Subscribers()
        self._workers = Workers(NAME, options.threads)
        self._clock = Clock(NAME)
        self._expiry: Alarm | None = None
        self._links: set[StoreLink] = set()
        self._server: Server | None = None
        self._closing = self._closed = False
        self._said_no_memory = False
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<store 'host'{', closed' if self._closed else ''}>"

    @property
    def segments(self) -> Segments:
        """The memory of the pages."""
        return self._segments

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError(f"the store {NAME!r} is closed")

    @contextlib.contextmanager
    def changing(self) -> Iterator[Index]:
        """The index, with the lock; then the listeners get the events."""
        try:
            with self._lock:
                self._reclaim()
                try:
                    yield self._index
                finally:
                    self._subscribers.queue(self._index.take_events())
        finally:
            self._subscribers.hand_out()

    def _reclaim(self) -> None:
        """With the lock: the slots of memory that was dropped are free."""
        while self._abandoned:
            for slot in self._abandoned.popleft():
                if slot is not None:
                    self._slots.free(slot)

    # -- jobs ----------------------------------------------------------------------------------

    def submit_lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._check_open()
        with self._lock:
            found = self._index.lookup(keys, HERE, lease_s)
        job.set(found)
        return job

    def submit_get(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._check_open()
        with self._lock:
            entries = self.pin(pages.keys)
        get = SlotGet(
            job,
            pages,
            self.seal,
            discard=lambda index, reason: self.discard(entries[index], reason),
            settled=lambda: self.unpin(entries),
            again=self._workers.add,
        )
        get.found(
            self._segments.view,
            [entry.offset if entry else 0 for entry in entries],
            [entry.header_bytes if entry else 0 for entry in entries],
            [entry.payload_bytes if entry else 0 for entry in entries],
        )
        for index, entry in enumerate(entries):
            if entry is None:
                get.miss(index, MissReason.ABSENT)
        self._begin(get, self._gets, is_needed=any(entries))
        return job

    def submit_put(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._check_open()
        memory = pages.memory
        if isinstance(memory, SlotBuffers):
            if memory.is_put:
                raise ValueError("this memory was put already: it belongs to the store")
            memory.is_put = True
        put = Put(job, pages, self._put_some, self._after_put)
        self._begin(put, self._puts, is_needed=job.count > 0)
        return job

    def _begin(self, task: Steps, live: set[Any], *, is_needed: bool) -> None:
        """Have the task done by the workers, until its deadline."""
        with self._lock:
            closing = self._closing
            if not closing:
                live.add(task)
        try:
            task.begin(self._clock, lambda ended: self._ended(ended, live))
        except RuntimeError as e:
            _log.warning("the store %r needs another thread: %s", NAME, e)
            task.end(MissReason.STORE_GONE)
        if closing:
            task.end(MissReason.CLOSED)
        elif not is_needed:
            task.end(None)
        elif not self._workers.add(task):
            task.end(MissReason.STORE_GONE)

    def _ended(self, task: Steps, live: set[Any]) -> None:
        with self._lock:
            live.discard(task)
            self._changed.notify_all()

    def submit_remove(self, keys: Sequence[bytes] | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        job: Job[bool] = Job(1 if keys is None else len(keys), self._deadline(timeout))
        self._check_open()
        self.remove(keys)
        job.set([True] * job.count)
        return job

    # -- gets ----------------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """With the lock: the pages, whose slots are not used again until :meth:`unpin`."""
        entries = [self._index.pages.get(key) for key in keys]
        for entry in entries:
            if entry is not None:
                self._index.pin(entry)
        return entries

    def unpin(self, entries: Sequence[Entry | None]) -> None:
        """The pages are not read any more. They were used."""
        with self._lock:
            there = [entry for entry in entries if entry is not None]
            for entry in there:
                self._index.unpin(entry)
            self._index.use([entry.key for entry in there if not entry.is_gone])

    def discard(self, entry: Entry | None, reason: MissReason) -> None:
        """A page was found to be wrong: it makes room for a right one."""
        if entry is None:
            return
        _log.warning("the store %r holds a wrong page (%s), which is removed", NAME, reason)
        with self.changing() as index:
            index.remove_entry(entry, PageRemoval.CORRUPT)

    # -- puts ----------------------------------------------------------------------------------

    def _put_some(self, put: Put, numbers: range) -> None:
        pages, seal = put.pages, self.seal
        form, memory = pages.series.format, pages.memory
        lengths = {at: seal.header_length(form, pages.identities[at]) for at in numbers}
        view = self._segments.view
        slots, results = self.reserve(put, {at: form.nbytes + lengths[at] for at in numbers})
        try:
            with put.copying():
                for run in runs_of([at for at in slots if not self._is_own(memory, at, slots[at])]):
                    rows = PageRows(view, [slots[at].offset for at in run], form.nbytes)
                    copying.save(memory, run.start, rows)
                for at, slot in slots.items():
                    payload = view[slot.offset : slot.offset + form.nbytes]
                    header = seal.header(pages.series, pages.identities[at], payload)
                    begin = slot.offset + form.nbytes
                    view[begin : begin + len(header)] = header
        except BaseException:
            self.give_back(slots.values())
            raise
        self.publish(put, slots, lengths, results)

    @staticmethod
    def _is_own(memory: Any, at: int, slot: Slot) -> bool:
        """Whether the page lies in its slot already."""
        return isinstance(memory, SlotBuffers) and memory.rows().offsets[at] == slot.offset

    def reserve(
        self, put: Put, sizes: dict[int, int]
    ) -> tuple[dict[int, Slot], list[tuple[int, PutReason | None]]]:
        """Slots for pages of a put, by number, given the bytes of each with its header; and the results of
        those that need none.

        Raises:
            OverError: the put has ended.
        """
        pages, memory = put.pages, put.pages.memory
        slots: dict[int, Slot] = {}
        results: list[tuple[int, PutReason | None]] = []
        with self.changing() as index:
            if put.is_over or self._closed:
                raise OverError
            held = []
            for at, nbytes in sizes.items():
                key = pages.keys[at]
                if put.is_forgotten(key):
                    results.append((at, PutReason.CANCELLED))
                elif key in index.pages:
                    held.append(key)
                    results.append((at, None))
                else:
                    found = self._slot(index, memory, at, nbytes)
                    if isinstance(found, PutReason):
                        results.append((at, found))
                    else:
                        slots[at] = found
            index.use(held)
        return slots, results

    def _slot(self, index: Index, memory: Any, at: int, nbytes: int) -> Slot | PutReason:
        own = memory.take(at, nbytes) if isinstance(memory, SlotBuffers) else None
        return own or self._new_slot(index, nbytes)

    def _new_slot(self, index: Index, nbytes: int) -> Slot | PutReason:
        try:
            return index.reserve(nbytes)
        except CapacityError as e:
            if not self._said_no_memory:
                _log.warning("the store %r keeps less than its budget: %s", NAME, e)
                self._said_no_memory = True
            return PutReason.NO_ROOM

    def give_back(self, slots: Any) -> None:
        """Slots are free that hold no page."""
        with self._lock:
            for slot in slots:
                self._slots.free(slot)

    def publish(
        self,
        put: Put,
        slots: dict[int, Slot],
        header_bytes: dict[int, int],
        results: list[tuple[int, PutReason | None]],
    ) -> None:
        """The pages are in their slots, whole, and their headers behind them: they are held from now on."""
        pages = put.pages
        stored = []
        with self.changing() as index:
            for at, slot in slots.items():
                key = pages.keys[at]
                if put.is_forgotten(key) or self._closed:
                    self._slots.free(slot)
                    results.append((at, PutReason.CANCELLED))
                    continue
                generation = self._segments.next_generation()
                entry = index.publish(
                    key,
                    pages.series.id,
                    slot,
                    payload_bytes=pages.series.format.nbytes,
                    header_bytes=header_bytes[at],
                    generation=generation,
                )
                if entry is not None:
                    self._segments.set_generation(slot.word, generation)
                    stored.append(key)
                results.append((at, None))
            index.tell_stored(pages.series.id, stored)
            put.note(results)

    def _after_put(self, put: Put) -> None:
        with self._lock:
            if isinstance(put.pages.memory, SlotBuffers):
                for slot in put.pages.memory.take_all():
                    self._slots.free(slot)
            self._index.refresh(put.pages.keys)

    # -- at once -------------------------------------------------------------------------------

    def allocate(self, series: Series, count: int) -> PageBuffers | None:
        self._check_open()
        form = series.format
        # What the identity of a page is long, is known when it is put: a parent and tokens as a rule.
        identity = bytes(32 + 8 * form.page_tokens if form.page_tokens else 128)
        nbytes = form.nbytes + self.seal.header_length(form, identity)
        slots: list[Slot] = []
        with self.changing() as index:
            while len(slots) < count:
                found = self._new_slot(index, nbytes)
                if isinstance(found, PutReason):
                    for slot in slots:
                        self._slots.free(slot)
                    return None
                slots.append(found)
        return SlotBuffers(form, self._segments.view, slots, self._abandoned.append)

    def free(self, memory: PageBuffers) -> None:
        if isinstance(memory, SlotBuffers) and not memory.is_put:
            with self._lock:
                for slot in memory.take_all():
                    self._slots.free(slot)

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        for_s = self._deadline(timeout).remaining()
        self._check_open()
        self.declare_for(HERE, series.id, keys, for_s)

    def declare_for(self, holder: Holder, series: bytes, keys: Sequence[bytes], for_s: float | None) -> None:
        """An end is going to put these pages within ``for_s`` seconds."""
        with self.changing() as index:
            index.declare(series, keys, holder, for_s)
        self._expire()

    def _expire(self) -> None:
        """End declared pages whose time is over, and have this called again when the next one's is."""
        with self._lock:
            if self._closing:
                return
        with self.changing() as index:
            again = index.expire()
            if self._expiry is not None:
                self._expiry.cancel()
            try:
                self._expiry = None if again is None else self._clock.at(again, self._expire)
            except RuntimeError as e:  # a lookup knows the time without it
                _log.warning("the store %r needs another thread: %s", NAME, e)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        with self.changing() as index:
            index.withdraw(keys, HERE)

    def release(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        with self._lock:
            self._index.release(keys, HERE)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        with self._lock:
            self._index.use(keys)

    def remove(self, keys: Sequence[bytes] | None) -> None:
        """Forget pages, also those that are declared or being put; ``None``: all."""
        with self.changing() as index:
            for put in (*self._puts, *self._arrivals):
                put.forget(keys)
            if keys is None:
                index.clear()
            else:
                index.remove(keys)

    def keys(self, series: Series) -> Sequence[bytes]:
        self._check_open()
        with self._lock:
            return self._index.keys(series.id)

    def usage(self) -> Usage:
        self._check_open()
        with self._lock:
            self._reclaim()
            return self._index.usage()

    @property
    def has_events(self) -> bool:
        return True

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        self._check_open()
        with self.changing() as index:
            self._subscribers.queue(index.take_events())  # they come before the snapshot
            return self._subscribers.add(listener, index.snapshot())

    # -- other processes -----------------------------------------------------------------------

    @property
    def epoch(self) -> str:
        """Of this life of the store."""
        return self._index.epoch

    def serve(self, link: StoreLink) -> None:
        from kvplug_host.serving.server import Server

        with self._lock:
            self._check_open()
            if self._server is None:
                self._server = Server(self)
            self._links.add(link)
            server = self._server
        try:
            server.serve(link)
        finally:
            with self._lock:
                self._links.discard(link)

    def begin_arrival(self, put: Put) -> None:
        """A put of another process begins, whose pages come over a pipe. It ends by its deadline."""
        with self._lock:
            if not self._closing:
                self._arrivals.add(put)
        put.begin(self._clock, lambda ended: self._ended(ended, self._arrivals))
        if self._closing:
            put.end(MissReason.CLOSED)

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._closing

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        with self._lock:
            self._closing = True
            others = [*self._gets, *self._arrivals]
        for other in others:
            other.end(MissReason.CLOSED)
        with self._lock:
            while self._puts and not self._closed:
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    break
        self.abort()

    def abort(self) -> None:
        with self._lock:
            first = not self._closed
            self._closing = self._closed = True
            tasks = [*self._gets, *self._puts, *self._arrivals]
            links, self._links = self._links, set()
            self._changed.notify_all()
        for task in tasks:
            task.end(MissReason.CLOSED)
        for link in links:
            link.close()
        if not first:
            return
        deadline = Deadline.after(_CLOSE_S)
        self._workers.close()
        self._clock.close()
        if self._server is not None:
            self._server.close()
        self._subscribers.end()
        self._workers.join(deadline)
        self._clock.join(deadline)
        self._segments.close()

    def _after_fork_in_child(self) -> None:
        self._closing = self._closed = True
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self._changed = threading.Condition(self._lock)
        tasks = [*self._gets, *self._puts, *self._arrivals]
        self._gets, self._puts, self._arrivals, self._links = set(), set(), set(), set()
        self._workers.after_fork()
        self._clock.after_fork()
        self._subscribers.after_fork()
        for task in tasks:
            task.after_fork()


def _shape(size: int, segment_bytes: int) -> tuple[int, int]:
    """Number and size of the segments of a store with that budget."""
    nbytes = max(_PAGE, min(segment_bytes, size) // _PAGE * _PAGE)
    return max(1, size // nbytes), nbytes
