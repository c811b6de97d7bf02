"""Lets a store serve caches on a device: pages are staged through pinned host memory.

A get brings pages into host memory by the store itself, verified there, and copies each layer to the device
once it has come for all pages. A put copies the pages into host memory, and gives them to the store when they
are there. Copies run on streams of their own, one for each direction, so that they neither wait for the
engine's kernels nor hold them up, beyond what they must:

- a get's copies run after what the blocks were used for before (``PageBlocks.after``, or what the calling
  thread has queued), and a layer counts as there when the device has come past its copy;
- a put's copies run after what the calling thread has queued, which has computed the pages; and what that
  thread queues next runs after them, so that blocks may be used again at once, unless some pages wait for
  host memory (``Job.reusable``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Final

from kvplug.errors import ClosedError
from kvplug.net.deadline import Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.streams import StreamPool
from kvplug.transport.store.engine import JobEngine
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.results import MissReason, PutReason
from kvplug.transport.store.staging.memory import PinnedMemory, StagedPages
from kvplug.transport.store.staging.transfers import Get, Lane, Put, Transfer
from kvplug.transport.store.store import J, PageRequest, Store, ended

_log = logging.getLogger(__name__)

MAX_BYTES: Final = 256 << 20
"""Of pinned memory, by default."""
_PIECE: Final = 4
"""Many pages come and go in pieces of this part of the pinned memory: while one is copied to the device, the
next ones are read from the store; and the reverse."""
_CLOSE_S: Final = 1.0
"""How long ``release`` waits for the device."""


class Staging:
    """What one store needs to serve memory on devices that it does not serve itself."""

    def __init__(
        self,
        store: Store,
        *,
        timeout_s: float = 30.0,
        memory: PinnedMemory | None = None,
        devices: frozenset[str] = frozenset({"cpu"}),
    ) -> None:
        """
        Args:
            timeout_s: the default deadline of a job.
            memory: shared with other stores of this process; by default its own, of :data:`MAX_BYTES`. A
                request that finds none free waits for it, and a large one comes in pieces.
            devices: types of devices for which the store needs no staging.
        """
        self._store = store
        self._timeout_s = timeout_s
        self._memory = PinnedMemory(MAX_BYTES) if memory is None else memory
        self.direct = devices
        """Types of devices for which nothing is staged."""
        self._jobs = JobEngine("staging", 0)
        self._lock = threading.Lock()
        self._lanes: dict[tuple[str, type[Transfer]], Lane] = {}
        self.devices: tuple[str, ...] = ()
        """The devices that pages were staged to."""
        close_after_fork(self)

    def prepare(self, device: str) -> None:
        """Make the pinned memory, which takes long, and the streams.

        Raises:
            RuntimeError: the device failed, or its driver gives no more memory.
            ClosedError: the store is closed.
        """
        for kind in (Get, Put):
            self._lane(device, kind)

    # -- jobs ----------------------------------------------------------------------------------

    def put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        """As :meth:`Store.submit_put`, out of memory on a device."""
        job: Job[PutReason | None] = Job(len(pages.keys), Deadline.after(timeout, self._timeout_s))
        return self._staged(Put, pages, job, PutReason.NO_MEMORY, PutReason.OTHER)

    def get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        """As :meth:`Store.submit_get`, into memory on a device."""
        job = GetJob(
            len(pages.keys), pages.series.format.num_layers, Deadline.after(timeout, self._timeout_s)
        )
        return self._staged(Get, pages, job, MissReason.NO_MEMORY, MissReason.OTHER)

    def _staged(self, kind: type[Transfer], pages: PageRequest, job: J, no_memory: Any, other: Any) -> J:
        """``no_memory``, ``other``: results where there is no memory, and where the device has failed."""
        transfer = None
        try:
            lane = self._lane(pages.memory.device, kind)
            if not (most := self._most(pages.series.format)):
                if kind is Put:
                    self._store.withdraw(pages.keys)
                return ended(job, no_memory)
            transfer = kind(self._store, job, pages, lane, most)
            transfer.queue()
        except ClosedError:
            raise
        except Exception as e:  # of the device
            if transfer is not None:
                transfer.lane.stream.synchronize()  # some copies may have been queued
                transfer.abandon()
            way = "out of" if kind is Put else "into"
            _log.warning("pages are not copied %s a cache on %s: %s", way, pages.memory.device, e)
            return ended(job, no_memory if NamedExhaustion.of(e) else other)
        self._jobs.begin(transfer)
        transfer.wake()
        return job

    def forget(self, keys: Sequence[bytes] | None) -> None:
        """Pages are removed: those that have not reached the store are not put. ``None``: all pages."""
        removed = None if keys is None else frozenset(keys)
        for task in self._jobs.tasks():
            if isinstance(task, Put):
                task.forget(removed)

    def _most(self, form: PageFormat) -> int:
        """How many pages are staged together; 0: not even one has room."""
        most = StagedPages.most_in(form, self._memory.nbytes // _PIECE)
        return most or int(StagedPages.nbytes_of(form, 1) <= self._memory.nbytes)

    def _lane(self, name: str, kind: type[Transfer]) -> Lane:
        self._jobs.check_open()
        with self._lock:
            lane = self._lanes.get((name, kind))
            if lane is None:
                import torch

                device = torch.device(name)
                self._memory.prepare(device)
                if not self._lanes:
                    self._memory.listen(self._wake)
                if device.type == "cuda" and not self._lanes:
                    _log.warning("staging KV to %s is experimental: do not serve users with it yet", name)
                lane = Lane(device, StreamPool.acquire(device), self._memory)
                self._lanes[name, kind] = lane
                self.devices = tuple(sorted({name for name, _ in self._lanes}))
            return lane

    def _wake(self) -> None:
        """Some of the pinned memory was given back."""
        for task in self._jobs.tasks():
            if isinstance(task, Transfer):
                task.wake()

    # -- the end -------------------------------------------------------------------------------

    def close(self, timeout: Timeout) -> Timeout:
        """End gets, and wait until puts have ended. Idempotent. Returns the time that is left."""
        deadline = Deadline.after(timeout, self._timeout_s)
        self._jobs.close(deadline)
        return deadline.remaining()

    def give_up(self) -> None:
        """End every job. Idempotent, and does not wait."""
        self._jobs.give_up()

    def release(self) -> None:
        """After :meth:`give_up`: give back the streams, and wait a moment for what the device has to do."""
        self._memory.ignore(self._wake)
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            StreamPool.release(lane.stream)
        self._jobs.join(Deadline.after(_CLOSE_S))

    def _after_fork_in_child(self) -> None:
        """Nothing: the engine of jobs ends the jobs, and a child must not free what a device uses."""
