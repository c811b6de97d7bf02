"""A store whose pages may also come from, and go to, a cache on a device: staged through pinned host memory.

A get brings pages into host memory by the store itself, verified there, and copies each layer to the device
once it has come for all pages. A put copies the pages into host memory, and gives them to the store when they
are there. Copies run on streams of their own, one for each direction, so that they neither wait for the
engine's kernels nor hold them up, beyond what they must:

- a get's copies run after what the blocks were used for before (``PageBlocks.after``, or what the calling
  thread has queued), and a layer counts as there when the device has come past its copy;
- a put's copies run after what the calling thread has queued, which has computed the pages; and what that
  thread queues next runs after them, so that blocks may be used again at once, unless some pages wait for
  host memory (``Job.reusable``).

Requests with memory of the host, or of a device that the store serves itself, pass straight through.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvplug.errors import ClosedError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.streams import StreamPool
from kvplug.net.threads import BackgroundThread, ExitGuard
from kvplug.transport.store.events import PageEvent
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.keys import Series
from kvplug.transport.store.memory import PageBuffers, PageMemory
from kvplug.transport.store.results import MissReason, Presence, PutReason, Usage
from kvplug.transport.store.staging.memory import PinnedMemory, StagedPages
from kvplug.transport.store.staging.transfers import Get, Lane, Put, Transfer
from kvplug.transport.store.store import J, PageRequest, Store, StoreLink, ended

_log = logging.getLogger(__name__)

MAX_BYTES: Final = 256 << 20
"""Of pinned memory, by default."""
_PIECE: Final = 4
"""Many pages come and go in pieces of this part of the pinned memory: while one is copied to the device, the
next ones are read from the store; and the reverse."""
_LOOK_S: Final = (50e-6, 1e-3)
"""How long the thread sleeps before it looks again at what the device has to do: at first, and at most. Marks
of a device cannot be waited for together, nor with a deadline."""
_CLOSE_S: Final = 1.0
"""How long ``abort`` waits for the device."""


class StagedStore(Store):
    """Another store, for memory on any device."""

    def __init__(
        self,
        store: Store,
        *,
        timeout_s: float = 30.0,
        memory: PinnedMemory | None = None,
        devices: frozenset[str] = frozenset({"cpu"}),
    ) -> None:
        """Owns ``store`` from here on.

        Args:
            timeout_s: the default deadline of a job.
            memory: shared with other stores of this process; by default its own, of :data:`MAX_BYTES`. A
                request that finds none free waits for it, and a large one comes in pieces.
            devices: types of devices for which the store needs no staging.
        """
        self.store = store
        """The store inside."""
        self.seal = store.seal
        self._timeout_s = timeout_s
        self._memory = PinnedMemory(MAX_BYTES) if memory is None else memory
        self._direct = devices
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._live: list[Transfer] = []
        self._is_told = False
        self._lanes: dict[tuple[str, type[Transfer]], Lane] = {}
        self._thread: BackgroundThread | None = None
        self._closing = self._closed = False
        self._devices: tuple[str, ...] = ()
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<staged {self.store!r}>"

    @property
    def is_shared(self) -> bool:
        return self.store.is_shared

    @property
    def medium(self) -> str:
        return self.store.medium

    @property
    def location(self) -> str:
        return self.store.location

    @property
    def route(self) -> str:
        """That of the store, and for which devices it was staged."""
        staged = f"staged to {', '.join(self._devices)}" if self._devices else ""
        return ", ".join(filter(None, (self.store.route, staged)))

    # -- what the store inside does ------------------------------------------------------------

    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        return self.store.submit_lookup(keys, lease_s=lease_s, timeout=timeout)

    def allocate(self, series: Series, count: int) -> PageBuffers | None:
        return self.store.allocate(series, count)

    def free(self, memory: PageBuffers) -> None:
        self.store.free(memory)

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self.store.declare(series, keys, timeout=timeout)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self.store.withdraw(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        self.store.release(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.store.touch(keys)

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        self.store.expect_reader(keys)

    def keys(self, series: Series) -> Sequence[bytes]:
        return self.store.keys(series)

    def usage(self) -> Usage:
        return self.store.usage()

    @property
    def has_events(self) -> bool:
        return self.store.has_events

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        return self.store.subscribe(listener)

    def serve(self, link: StoreLink) -> None:
        self.store.serve(link)

    # -- jobs ----------------------------------------------------------------------------------

    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        if not pages.keys or self._is_direct(pages.memory):
            return self.store.submit_put(pages, timeout=timeout)
        job: Job[PutReason | None] = Job(len(pages.keys), Deadline.after(timeout, self._timeout_s))
        return self._staged(Put, pages, job, PutReason.NO_MEMORY, PutReason.OTHER)

    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        if not pages.keys or self._is_direct(pages.memory):
            return self.store.submit_get(pages, timeout=timeout)
        num_layers = pages.series.format.num_layers
        job = GetJob(len(pages.keys), num_layers, Deadline.after(timeout, self._timeout_s))
        return self._staged(Get, pages, job, MissReason.NO_MEMORY, MissReason.OTHER)

    def _staged(self, kind: type[Transfer], pages: PageRequest, job: J, no_memory: Any, other: Any) -> J:
        """``no_memory``, ``other``: results where there is no memory, and where the device has failed."""
        self._check_open()
        device, transfer = pages.memory.device, None
        try:
            lane = self._lane(device, kind)
            if not (most := self._most(pages.series.format)):
                if kind is Put:
                    self.store.withdraw(pages.keys)
                return ended(job, no_memory)
            transfer = kind(self.store, job, pages, lane, most)
            transfer.begin()
        except Exception as e:  # of the device
            if transfer is not None:
                transfer.lane.stream.synchronize()  # some copies may have been queued
                transfer.abandon()
            way = "out of" if kind is Put else "into"
            _log.warning("pages are not copied %s a cache on %s: %s", way, device, e)
            return ended(job, no_memory if NamedExhaustion.of(e) else other)
        self._add(transfer)
        return job

    def submit_remove(self, keys: Sequence[bytes] | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        removed = None if keys is None else frozenset(keys)
        with self._lock:
            puts = [each for each in self._live if isinstance(each, Put)]
        for put in puts:
            put.forget(removed)
        return self.store.submit_remove(keys, timeout=timeout)

    def register_memory(self, memory: PageMemory) -> None:
        """Also makes the pinned memory, which takes long, where it is needed."""
        if self._is_direct(memory):
            self.store.register_memory(memory)
        else:
            for kind in (Get, Put):
                self._lane(memory.device, kind)

    def _most(self, form: PageFormat) -> int:
        """How many pages are staged together; 0: not even one has room."""
        most = StagedPages.most_in(form, self._memory.nbytes // _PIECE)
        return most or int(StagedPages.nbytes_of(form, 1) <= self._memory.nbytes)

    def _is_direct(self, memory: PageMemory) -> bool:
        return memory.device.partition(":")[0] in self._direct

    def _check_open(self) -> None:
        if self._closing:
            ExitGuard.hold()
            raise ClosedError(f"{self.store!r} is closed")

    # -- memory and streams --------------------------------------------------------------------

    def _lane(self, name: str, kind: type[Transfer]) -> Lane:
        with self._lock:
            self._check_open()
            lane = self._lanes.get((name, kind))
            if lane is None:
                import torch

                device = torch.device(name)
                self._start()
                self._memory.prepare(device)
                if not self._lanes:
                    self._memory.listen(self._wake)
                if device.type == "cuda" and not self._lanes:
                    _log.warning("staging KV to %s is experimental: do not serve users with it yet", name)
                lane = Lane(device, StreamPool.acquire(device), self._memory, self._wake)
                self._lanes[name, kind] = lane
                self._devices = tuple(sorted({name for name, _ in self._lanes}))
            return lane

    # -- the thread ----------------------------------------------------------------------------

    def _start(self) -> None:
        """With the lock: there is a thread.

        Raises:
            RuntimeError: there can be no more threads.
        """
        if self._thread is None:
            thread = BackgroundThread(self._run, name="kvplug-staging", stop=self._give_up)
            thread.start()
            self._thread = thread

    def _add(self, transfer: Transfer) -> None:
        with self._lock:
            closed = self._closed
            self._live.append(transfer)
            try:
                self._start()  # another one, if the store was closed meanwhile
            except RuntimeError as e:
                _log.warning("pages cannot be staged: %s", e)
                self._live.remove(transfer)
                transfer.end(MissReason.NO_MEMORY)
                transfer.lane.stream.synchronize()
                transfer.abandon()
        if closed:
            transfer.end(MissReason.CLOSED)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            self._is_told = True
            self._changed.notify_all()

    def _run(self) -> None:
        pause, longest = _LOOK_S
        while True:
            with self._lock:
                self._is_told = False
                live = list(self._live)
                if not live:
                    if self._closed:
                        self._thread = None
                        return
                    self._changed.wait()
                    continue
            over = [transfer for transfer in live if self._step(transfer)]
            with self._lock:
                self._live = [transfer for transfer in self._live if transfer not in over]
                self._changed.notify_all()
                if self._is_told or over:
                    pause = _LOOK_S[0]
                    continue
                if any(transfer.is_on_device for transfer in live):
                    self._changed.wait(pause)
                    pause = min(2 * pause, longest)
                else:
                    ends = [transfer.job.deadline.at for transfer in live if not transfer.job.done]
                    left = min(ends, default=math.inf) - time.monotonic()
                    self._changed.wait(max(0.0, min(left, 1e6)))

    def _step(self, transfer: Transfer) -> bool:
        """Returns whether the request is over."""
        was_done = transfer.job.done
        try:
            with transfer.lane.on_device():
                return transfer.step()
        except Exception as e:  # of the device, or of the store's own
            if was_done:
                transfer.abandon()
                return True
            if isinstance(e, ClosedError):
                transfer.end(MissReason.CLOSED)
            else:
                _log.warning("staging pages failed: %s", e)
                transfer.end(MissReason.NO_MEMORY if NamedExhaustion.of(e) else MissReason.OTHER)
            self._wake()
            return False

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._closing or self.store.is_lost

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        with self._lock:
            self._closing = True
            gets = [transfer for transfer in self._live if not isinstance(transfer, Put)]
        for get in gets:
            get.end(MissReason.CLOSED)
        self._wake()
        with self._lock:
            while not self._closed and any(type(each) is Put and not each.job.done for each in self._live):
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    break
        self.store.close(deadline.remaining())
        self.abort()
        if self.recorder is not None:
            self.recorder.close()

    def abort(self) -> None:
        self._give_up()
        self.store.abort()
        self._memory.ignore(self._wake)
        with self._lock:
            lanes, self._lanes = self._lanes, {}
            thread = self._thread
        for lane in lanes.values():
            StreamPool.release(lane.stream)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _give_up(self) -> None:
        """End every job; the thread ends when the device has done what was queued."""
        with self._lock:
            self._closing = self._closed = True
            live = list(self._live)
        for transfer in live:
            transfer.end(MissReason.CLOSED)
        self._wake()

    def _after_fork_in_child(self) -> None:
        self._closing = self._closed = True
        self._thread = None
        for transfer in self._live:  # which are kept: a child must not free what a device uses
            transfer.job.after_fork(transfer.results_for(MissReason.CLOSED))
