"""Requests for pages in memory on a device: what each waits for, and its next steps.

The clock of the job engine looks at each request when something has changed for it, and polls it while the
device has copies of it to do. Nothing waits for the device, since one cannot wait for several device marks
together, nor with a deadline.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug.errors import ClosedError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.streams import DeviceMark, on_stream
from kvplug.transport.store.cache_blocks import PageBlocks
from kvplug.transport.store.engine import JobEngine, JobTask
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.results import MissReason, PutReason
from kvplug.transport.store.staging.memory import PinnedMemory, StagedPages, queue_gather, queue_scatter
from kvplug.transport.store.store import PageRequest, Store

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_LOOK_S: Final = (50e-6, 1e-3)
"""The pause between two looks at the device: the first one, and the maximum; it doubles each time."""


@attrs.define(eq=False)
class Lane:
    """The stream and memory that transfers of one direction share on one device."""

    device: torch.device
    stream: Any
    memory: PinnedMemory

    def on_device(self) -> Any:
        """A context that makes this the calling thread's current device, which events query."""
        import torch

        return torch.get_device_module(self.device).device(self.device)

    def mark(self) -> DeviceMark:
        """Return a mark after all that is queued on the stream so far."""
        with on_stream(self.stream):
            return DeviceMark(self.device)

    def wait_for(self, mark: DeviceMark | None) -> None:
        """Make all that is queued on the stream from now on run after the mark."""
        if mark is not None:
            mark.hold(self.stream)

    def make_caller_wait_for(self, mark: DeviceMark) -> None:
        """Make all that the calling thread queues from now on, on its own stream, run after the mark."""
        import torch

        mark.hold(torch.get_device_module(self.device).current_stream(self.device))

    def pages(self, form: PageFormat, count: int, waiter: object = None) -> StagedPages | None:
        """Return host memory for ``count`` pages, or ``None`` if none is free. Passing ``waiter`` queues the
        caller, ahead of callers without a waiter."""
        part = self.memory.take(StagedPages.nbytes_of(form, count), waiter)
        return None if part is None else StagedPages(form, count, part)


@attrs.define(eq=False)
class _Piece:
    """Pages of one request that are staged together."""

    pages: range
    staged: StagedPages | None = None
    job: Any = None
    """The store's job, or ``None`` if it was not submitted yet."""
    marks: deque[tuple[DeviceMark, int]] = attrs.field(factory=deque)
    """A mark after each group of queued copies; for a get with the number of layers in the cache by then."""
    is_over: bool = False
    num_queued: int = 0
    """For a get: layers whose copies to the device were queued."""
    num_landed: int = 0
    """For a get: layers that are in the cache."""
    has_failed: bool = False
    """For a get: whether some copies could not be queued, so that no more are."""


class Transfer(JobTask):
    """One request in pieces, each staged when there is memory for it."""

    def __init__(self, store: Store, job: Job[Any], request: PageRequest, lane: Lane, max_pages: int) -> None:
        """``max_pages``: how many pages are staged together."""
        assert isinstance(request.memory, PageBlocks)
        super().__init__(job, None)
        self.lane = lane
        self.is_on_device = False
        """Whether the device has copies of the request to do, so that it must be polled often."""
        self._store = store
        self._request = request
        self._blocks = request.memory
        self._pieces = [
            _Piece(range(at, min(at + max_pages, job.count))) for at in range(0, job.count, max_pages)
        ]
        self._is_finished = False
        self._look: JobEngine.Alarm | None = None
        """The alarm for the next look."""
        self._pause = _LOOK_S[0]

    # -- looks ---------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        return not self._is_finished

    @property
    def is_copying(self) -> bool:
        """Always true, since the job settles after its end, when the device has finished with the blocks."""
        return True

    def ended(self) -> None:
        super().ended()
        self.wake()

    def wake(self) -> None:
        """Schedule a look now, since something has changed. From any thread."""
        self._pause = _LOOK_S[0]
        self._look_at(0.0)

    def _look_at(self, when: float) -> None:
        with self.lock:
            if self._engine is None or self._is_finished:
                return
            if self._look is not None:
                self._look.cancel()
            try:
                self._look = self._engine.at(when, self.look)
                return
            except RuntimeError:  # no thread can start, so the job ends
                self._is_finished = True
        self.end(MissReason.NO_MEMORY)
        self.lane.stream.synchronize()  # some copies may have been queued
        self.abandon()
        super().ended()

    def look(self) -> None:
        """Take the steps that are possible now, and schedule the next look."""
        if self._is_finished:
            return
        was_over = self.is_over
        try:
            with self.lane.on_device():
                self._is_finished = self.step()
        except Exception as e:  # an error of the device or the store
            if was_over:
                self.abandon()
                self._is_finished = True
            elif isinstance(e, ClosedError):
                self.end(MissReason.CLOSED)
            else:
                _log.warning("staging pages failed: %s", e)
                self.end(MissReason.NO_MEMORY if NamedExhaustion.of(e) else MissReason.OTHER)
        if self._is_finished:
            super().ended()
        elif self.is_on_device:
            self._look_at(time.monotonic() + self._pause)
            self._pause = min(2 * self._pause, _LOOK_S[1])

    def step(self) -> bool:
        """Take the steps that are possible now. Returns whether nothing of the request is under way."""
        for piece in self._pieces:
            if not piece.is_over and not self._step(piece):
                break  # the next piece is staged when this one has its memory
        self.is_on_device = any(piece.marks for piece in self._pieces)
        is_finished = self._note_progress()
        if is_finished:
            self.end(None)
            self.abandon()
        return is_finished

    def abandon(self) -> None:
        """Give the memory back, and settle the job, when the device has finished or failed."""
        for piece in self._pieces:
            self._give_back(piece)
        self.job.settle()

    def _end(self, piece: _Piece) -> None:
        """Record the results of a finished piece, and give its memory back."""
        for at, result in zip(piece.pages, piece.job.results() if piece.job else (), strict=False):
            self.note(at, result)
        piece.is_over = True
        self._give_back(piece)

    def _give_back(self, piece: _Piece) -> None:
        staged, piece.staged = piece.staged, None
        if staged is not None:
            self.lane.memory.give_back(staged.memory)

    def _part(self, piece: _Piece) -> PageRequest:
        """Return the store's request for a piece, in its staged memory."""
        assert piece.staged is not None
        pages = slice(piece.pages.start, piece.pages.stop)
        return attrs.evolve(
            self._request,
            keys=self._request.keys[pages],
            identities=self._request.identities[pages],
            memory=piece.staged,
        )

    @abc.abstractmethod
    def queue(self) -> None:
        """Queue the first device work. Called in the thread that submits the request.

        Raises:
            RuntimeError: the device failed, or has no memory.
        """

    @abc.abstractmethod
    def _step(self, piece: _Piece) -> bool:
        """Take the steps that are possible for one piece. Returns whether the piece has its memory."""

    @abc.abstractmethod
    def _note_progress(self) -> bool:
        """Note progress after the steps of all pieces. Returns whether the request is over."""


class Get(Transfer):
    """A transfer of pages into a cache on a device."""

    job: GetJob

    def queue(self) -> None:
        self._after = self._blocks.after or DeviceMark(self.lane.device)

    def result_for(self, reason: MissReason | None) -> MissReason:
        return reason or MissReason.OTHER

    def _step(self, piece: _Piece) -> bool:
        if piece.job is None:
            if self.is_over:
                return False
            piece.staged = self.lane.pages(self._request.series.format, len(piece.pages), self)
            if piece.staged is None:
                return False
            piece.job = self._store._get(self._part(piece), self.job.deadline.remaining())
            piece.job.watch(self.wake)
        inner, staged = piece.job, piece.staged
        assert staged is not None
        has_ended = inner.done and inner.settled  # read first: later arrivals are queued next time
        if self.is_over:
            inner.cancel()
        else:
            self._queue(piece, inner, staged)
        while piece.marks and piece.marks[0][0].is_passed:
            piece.num_landed = piece.marks.popleft()[1]
        if has_ended and not piece.marks:
            self._end(piece)
        return True

    def _queue(self, piece: _Piece, inner: GetJob, staged: StagedPages) -> None:
        """Queue copies of the layers that have arrived."""
        ready = inner.num_layers_ready  # read before the results: if all are ready, misses are known
        results = inner.results()
        layers = range(piece.num_queued, ready)
        if not layers or piece.has_failed:
            return
        runs = [range(len(piece.pages))] if results is None else _found(results)
        if not piece.num_queued:
            self.lane.wait_for(self._after)
        piece.has_failed = True
        try:
            if runs:
                queue_scatter(staged, self._blocks, piece.pages.start, layers, runs, self.lane.stream)
            piece.has_failed = False
            piece.num_queued = ready
        finally:  # some copies may be queued even if others could not be
            piece.marks.append((self.lane.mark(), piece.num_queued))

    def _note_progress(self) -> bool:
        if self.is_over:
            self.lane.memory.forget(self)  # work under way may take long, and others wait behind it
            if not self.is_on_device:
                self.job.settle()  # the store may still write into host memory
            return all(piece.is_over or piece.job is None for piece in self._pieces)
        arrived = max((piece.job.progressed_at for piece in self._pieces if piece.job), default=0.0)
        ready = min(piece.num_landed for piece in self._pieces)
        if ready > self.job.num_layers_ready or arrived > self.job.progressed_at:
            self.job.advance(ready)
        return all(piece.is_over for piece in self._pieces)

    def abandon(self) -> None:
        self.lane.memory.forget(self)
        super().abandon()


def _found(results: list[MissReason | None]) -> list[range]:
    """Return runs of consecutive pages that were not missed."""
    runs: list[range] = []
    for at, missed in enumerate(results):
        if missed is None:
            if runs and runs[-1].stop == at:
                runs[-1] = range(runs[-1].start, at + 1)
            else:
                runs.append(range(at, at + 1))
    return runs


class Put(Transfer):
    """A transfer of pages out of a cache on a device.

    Pieces are copied at once as far as host memory allows. The other pieces wait for memory that is given
    back, behind every waiting get, at most until the deadline. Until then their blocks are in use.
    """

    is_put = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._num_read = 0
        """Pieces whose copies were queued."""
        self._handing_over = threading.Lock()
        """Held while pages go to the store, so that a removal finds them either here or there."""

    def queue(self) -> None:
        """Queue copies of the pieces that there is memory for. If these are all pieces, the calling thread's
        next device work runs after the copies, and the blocks are reusable."""
        self.lane.wait_for(self._blocks.after)
        self.lane.wait_for(DeviceMark(self.lane.device))
        if all(map(self._gather, self._pieces)):
            self.lane.make_caller_wait_for(self.lane.mark())
            self.job.allow_reuse()

    def _gather(self, piece: _Piece) -> bool:
        """Queue the copies of a piece. Returns whether there was memory for it."""
        piece.staged = self.lane.pages(self._request.series.format, len(piece.pages))
        if piece.staged is None:
            return False
        try:
            queue_gather(piece.staged, self._blocks, piece.pages.start, self.lane.stream)
        finally:  # some copies may be queued even if others could not be
            piece.marks.append((self.lane.mark(), 0))
            self.is_on_device = True
        self._num_read += 1
        return True

    def final(self, reason: MissReason | None) -> list[PutReason | None]:
        results: list[PutReason | None] = super().final(reason)
        if reason is MissReason.TIMEOUT:
            for piece in self._pieces:
                if piece.staged is None and not piece.is_over:
                    results[piece.pages.start : piece.pages.stop] = [PutReason.NO_MEMORY] * len(piece.pages)
        return results

    def result_for(self, reason: MissReason | None) -> PutReason:
        if reason is MissReason.NO_MEMORY:
            return PutReason.NO_MEMORY
        return PutReason.of(reason or MissReason.OTHER)

    def forget(self, keys: frozenset[bytes] | None) -> None:
        """Cancel the whole put if some removed pages have not reached the store.

        ``None``: every page is removed.
        """
        with self._handing_over:
            for piece in self._pieces:
                mine = self._request.keys[piece.pages.start : piece.pages.stop]
                if piece.job is None and (keys is None or not keys.isdisjoint(mine)):
                    self.end(MissReason.CANCELLED)

    def _step(self, piece: _Piece) -> bool:
        if piece.staged is None and (self.is_over or not self._gather(piece)):
            return False
        if piece.marks:
            if not piece.marks[0][0].is_passed:
                return True
            piece.marks.clear()
        with self._handing_over:
            if piece.job is None and not self.is_over:
                piece.job = self._store._put(self._part(piece), self.job.deadline.remaining())
                piece.job.watch(self.wake)
        inner = piece.job
        if inner is not None:
            if self.is_over:
                inner.cancel()
            if not (inner.done and inner.settled):
                return True
        self._end(piece)
        return True

    def _note_progress(self) -> bool:
        if not self.is_on_device and (self.is_over or self._num_read == len(self._pieces)):
            self.job.settle()
        return all(piece.is_over or (self.is_over and piece.staged is None) for piece in self._pieces)

    def abandon(self) -> None:
        super().abandon()
        for piece in self._pieces:
            if piece.job is None:
                with contextlib.suppress(ClosedError):
                    self._store.withdraw(self._request.keys[piece.pages.start : piece.pages.stop])
