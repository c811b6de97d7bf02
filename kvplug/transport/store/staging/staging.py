"""Lets a store serve caches on a device by staging pages through pinned host memory.

For a get, the store reads pages into host memory and verifies them there. Each layer is copied to the device
once the store has it for all pages. For a put, the pages are copied into host memory, or straight into memory
of the store if it reserves some, and then given to the store. Copies run on one stream for each direction, so
that they and the engine's kernels do not wait for each other except where they must:

- A get's copies run after earlier uses of the blocks (``PageBlocks.after``, or what the calling thread has
  queued). A layer is ready when the device has finished its copy.
- A put's copies run after what the calling thread has queued, which computes the pages. They run beside what
  it queues next, with the lowest priority. The caller must not change the blocks until the job settles, or
  until it takes them back (``Job.take_back``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from kvplug.errors import ClosedError
from kvplug.net.deadline import Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.streams import StreamPool
from kvplug.transport.store.engine import JobEngine
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.results import MissReason, PutReason
from kvplug.transport.store.staging.memory import PinnedMemory, StagedPages
from kvplug.transport.store.staging.transfers import (
    Get,
    Lane,
    Put,
    StagedGetJob,
    Transfer,
    stage_together,
)
from kvplug.transport.store.store import J, PageRequest, Store, ended

_log = logging.getLogger(__name__)

MAX_BYTES: Final = 256 << 20
"""Bytes of pinned memory by default."""
_PIECE: Final = 4
"""Large requests are staged in pieces of at most a quarter of the pinned memory, so that one piece is copied
to the device while the next ones are read from the store, or the reverse."""
_THREADS: Final = 4
"""Pieces of each direction that move at the same time."""
_CLOSE_S: Final = 1.0
"""How long ``release`` waits for the device's work."""


class Staging:
    """Serves memory on devices for one store."""

    def __init__(
        self,
        store: Store,
        *,
        timeout_s: float = 30.0,
        memory: PinnedMemory | None = None,
    ) -> None:
        """
        Args:
            timeout_s: the default deadline of a job.
            memory: pinned memory, which stores of this process may share; by default its own, of
                :data:`MAX_BYTES`. Requests wait for free memory, and large ones are staged in pieces.
        """
        self._store = store
        self._timeout_s = timeout_s
        self._memory = PinnedMemory(MAX_BYTES) if memory is None else memory
        self._gets, self._puts = (JobEngine(f"staging-{op}", _THREADS) for op in ("get", "put"))
        self._held = threading.local()
        self._staging = threading.Lock()
        self._lock = threading.Lock()
        self._lanes: dict[tuple[str, type[Transfer]], Lane] = {}
        self.devices: tuple[str, ...] = ()
        """The devices that were prepared or used so far."""

    def prepare(self, device: str) -> None:
        """Allocate the pinned memory, which takes long, and the streams.

        Raises:
            RuntimeError: the device failed, or its driver cannot allocate more memory.
            ClosedError: the store is closed.
        """
        for kind in (Get, Put):
            self._lane(device, kind)

    # -- jobs ----------------------------------------------------------------------------------

    def put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        """Serve :meth:`Store.submit_put` from memory on a device."""
        job: Job[PutReason | None] = Job(len(pages.keys), Deadline.after(timeout, self._timeout_s))
        return self._staged(Put, self._puts, pages, job)

    def get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        """Serve :meth:`Store.submit_get` into memory on a device."""
        job = StagedGetJob(
            len(pages.keys), pages.series.format.num_layers, Deadline.after(timeout, self._timeout_s)
        )
        return self._staged(Get, self._gets, pages, job)

    def _staged(self, kind: type[Transfer], engine: JobEngine, pages: PageRequest, job: J) -> J:
        """Start a transfer."""
        reasons = PutReason if kind is Put else MissReason
        try:
            lane = self._lane(pages.memory.device, kind)
            if not (most := self._most(pages.series.format)):
                if kind is Put:
                    self._store.withdraw(pages.keys)
                return ended(job, reasons.NO_MEMORY)
            task = kind(self._store, job, pages, lane, most)
            task.queue()
        except ClosedError:
            raise
        except Exception as e:  # an error of the device
            if kind is Put:
                self._store.withdraw(pages.keys)
            _log.warning("cannot copy pages of a cache on %s: %s", pages.memory.device, e)
            return ended(job, reasons.NO_MEMORY if NamedExhaustion.of(e) else reasons.OTHER)
        try:
            engine.begin(task)
            if kind is Get:
                self._add(engine, task)
            elif not getattr(self._held, "puts", False):
                self.note_free_memory()
        except BaseException:  # the caller has no job to wait for, and may use the blocks again
            task.end(MissReason.CANCELLED)
            engine.add(task)  # its steps give memory back
            raise
        return job

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Queue the copies of the puts that the calling thread submits in this block together, at its end."""
        self._held.puts = True
        try:
            yield
        finally:
            self._held.puts = False
            self.note_free_memory()

    def _add(self, engine: JobEngine, task: Transfer) -> None:
        if not engine.add(task):
            task.end(MissReason.NO_MEMORY)  # no thread can start
            engine.run_steps(task)

    def forget(self, keys: Sequence[bytes] | None) -> None:
        """Cancel puts of removed pages that have not reached the store. ``None``: all pages are removed."""
        removed = None if keys is None else frozenset(keys)
        for task in self._puts.tasks():
            if isinstance(task, Put):
                task.forget(removed)

    def _most(self, form: PageFormat) -> int:
        """Return how many pages are staged together; 0 if there is no room for one."""
        most = StagedPages.most_in(form, self._memory.nbytes // _PIECE)
        return most or int(StagedPages.nbytes_of(form, 1) <= self._memory.nbytes)

    def _lane(self, name: str, kind: type[Transfer]) -> Lane:
        self._gets.check_open()
        with self._lock:
            lane = self._lanes.get((name, kind))
            if lane is None:
                import torch

                device = torch.device(name)
                self._memory.prepare(device, self)
                if device.type == "cuda" and not self._lanes:
                    _log.warning("staging KV to %s is experimental: do not serve users with it yet", name)
                # an engine waits for gets, but not for puts
                lane = Lane(device, StreamPool.acquire(device, is_urgent=kind is Get), self._memory)
                self._lanes[name, kind] = lane
                self.devices = tuple(sorted({name for name, _ in self._lanes}))
            return lane

    def note_free_memory(self) -> None:
        """Continue puts that wait for pinned memory."""
        waiting: dict[tuple[Lane, PageFormat], list[Put]] = {}
        for task in self._puts.tasks():
            if isinstance(task, Put):
                waiting.setdefault((task.lane, task.form), []).append(task)
        for (lane, _), puts in waiting.items():
            failed: dict[Put, Exception] = {}
            try:
                with self._staging, lane.on_device():
                    failed = stage_together(puts)
            finally:
                for put, error in failed.items():
                    put.end(put.fault(error))
                for put in puts:
                    if put.has_steps():
                        self._add(self._puts, put)

    # -- the end -------------------------------------------------------------------------------

    def close(self, timeout: Timeout) -> Timeout:
        """End gets, and wait until puts have ended. Idempotent. Returns the remaining time."""
        deadline = Deadline.after(timeout, self._timeout_s)
        for engine in (self._gets, self._puts):
            engine.close(deadline)
        return deadline.remaining()

    def give_up(self) -> None:
        """End every job. Idempotent; does not wait."""
        for engine in (self._gets, self._puts):
            engine.give_up()

    def release(self) -> None:
        """After :meth:`give_up`: give back the streams, and wait a moment for the device's work."""
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for (_, kind), lane in lanes.items():
            StreamPool.release(lane.stream, is_urgent=kind is Get)
        deadline = Deadline.after(_CLOSE_S)
        for engine in (self._gets, self._puts):
            engine.join(deadline)
