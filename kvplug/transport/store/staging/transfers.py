"""Requests for pages whose memory is on a device: what each waits for, and does next.

The clock of the engine of jobs looks at each request whenever something has changed for it, and now and then
while the device has copies of it to do: marks, which say what has run there, cannot be waited for together,
nor with a deadline. So nothing waits for the device.
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
"""Before it is looked again at what the device has to do: at first, and at most; doubled each time."""


@attrs.define(eq=False)
class Lane:
    """What transfers of one direction share on one device."""

    device: torch.device
    stream: Any
    memory: PinnedMemory

    def on_device(self) -> Any:
        """A context in which the device is the calling thread's current one: events ask the current one."""
        import torch

        return torch.get_device_module(self.device).device(self.device)

    def mark(self) -> DeviceMark:
        """Behind what was queued on the stream by now."""
        with on_stream(self.stream):
            return DeviceMark(self.device)

    def wait_for(self, mark: DeviceMark | None) -> None:
        """What is queued on the stream from now on runs after the mark."""
        if mark is not None:
            mark.hold(self.stream)

    def make_caller_wait_for(self, mark: DeviceMark) -> None:
        """What the calling thread queues from now on, on its own stream, runs after the mark."""
        import torch

        mark.hold(torch.get_device_module(self.device).current_stream(self.device))

    def pages(self, form: PageFormat, count: int, waiter: object = None) -> StagedPages | None:
        """Host memory for so many pages; ``None``: not now. The waiter has a turn, before those that only ask
        again."""
        part = self.memory.take(StagedPages.nbytes_of(form, count), waiter)
        return None if part is None else StagedPages(form, count, part)


@attrs.define(eq=False)
class _Piece:
    """Pages of one request that are staged together."""

    pages: range
    staged: StagedPages | None = None
    job: Any = None
    """That of the store; ``None``: it was not asked yet."""
    marks: deque[tuple[DeviceMark, int]] = attrs.field(factory=deque)
    """Behind each group of queued copies; of a get with the number of layers that are in the cache then."""
    is_over: bool = False
    num_queued: int = 0
    """Of a get: layers whose copies to the device were queued."""
    num_landed: int = 0
    """Of a get: layers that are in the cache."""
    has_failed: bool = False
    """Of a get: some copies could not be queued, and no more of them are."""


class Transfer(JobTask):
    """One request, in pieces: each is staged when there is memory for it."""

    def __init__(self, store: Store, job: Job[Any], request: PageRequest, lane: Lane, max_pages: int) -> None:
        """``max_pages``: that are staged together."""
        assert isinstance(request.memory, PageBlocks)
        super().__init__(job, None)
        self.lane = lane
        self.is_on_device = False
        """Whether the device has copies of it to do: then it is looked at often."""
        self._store = store
        self._request = request
        self._blocks = request.memory
        self._pieces = [
            _Piece(range(at, min(at + max_pages, job.count))) for at in range(0, job.count, max_pages)
        ]
        self._is_finished = False
        self._look: JobEngine.Alarm | None = None
        """The next look."""
        self._pause = _LOOK_S[0]

    # -- looks ---------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        return not self._is_finished

    @property
    def is_copying(self) -> bool:
        """The job settles apart from its end, when the device is done with the blocks."""
        return True

    def ended(self) -> None:
        super().ended()
        self.wake()

    def wake(self) -> None:
        """Something has changed for it: have it looked at now. Any thread."""
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
            except RuntimeError:  # there can be no more threads, so the job has ended
                self._is_finished = True
        self.end(MissReason.NO_MEMORY)
        self.lane.stream.synchronize()  # some copies may have been queued
        self.abandon()
        super().ended()

    def look(self) -> None:
        """Do what can be done now."""
        if self._is_finished:
            return
        was_over = self.is_over
        try:
            with self.lane.on_device():
                self._is_finished = self.step()
        except Exception as e:  # of the device, or of the store's own
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
        """Do what can be done now. Returns whether the request is over: nothing of it is under way."""
        for piece in self._pieces:
            if not piece.is_over and not self._step(piece):
                break  # the next one is staged when this one has its memory
        self.is_on_device = any(piece.marks for piece in self._pieces)
        is_finished = self._note_progress()
        if is_finished:
            self.end(None)
            self.abandon()
        return is_finished

    def abandon(self) -> None:
        """Give the memory back, and settle the job: the device is done with both, or has failed."""
        for piece in self._pieces:
            self._give_back(piece)
        self.job.settle()

    def _end(self, piece: _Piece) -> None:
        """Nothing of the piece is under way: its memory is for the next one."""
        for at, result in zip(piece.pages, piece.job.results() if piece.job else (), strict=False):
            self.note(at, result)
        piece.is_over = True
        self._give_back(piece)

    def _give_back(self, piece: _Piece) -> None:
        staged, piece.staged = piece.staged, None
        if staged is not None:
            self.lane.memory.give_back(staged.memory)

    def _part(self, piece: _Piece) -> PageRequest:
        """The request for a piece, in its staged memory."""
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
        """Queue what can be queued for the device. To be called in the thread that asks.

        Raises:
            RuntimeError: the device failed, or has no memory.
        """

    @abc.abstractmethod
    def _step(self, piece: _Piece) -> bool:
        """Do what can be done for one piece. Returns whether it has its memory."""

    @abc.abstractmethod
    def _note_progress(self) -> bool:
        """Note what has come, after each piece had its step. Returns whether the request is over."""


class Get(Transfer):
    """Pages into a cache on a device."""

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
        has_ended = inner.done and inner.settled  # asked first: what comes meanwhile is queued next time
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
        """Queue copies of the layers that have come."""
        ready = inner.num_layers_ready  # before the results: all layers, only with the pages that were missed
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
        finally:  # some copies may be queued though others could not be
            piece.marks.append((self.lane.mark(), piece.num_queued))

    def _note_progress(self) -> bool:
        if self.is_over:
            self.lane.memory.forget(self)  # what is under way may take long, and others wait behind it
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
    """The consecutive pages that were not missed."""
    runs: list[range] = []
    for at, missed in enumerate(results):
        if missed is None:
            if runs and runs[-1].stop == at:
                runs[-1] = range(runs[-1].start, at + 1)
            else:
                runs.append(range(at, at + 1))
    return runs


class Put(Transfer):
    """Pages out of a cache on a device.

    As many pieces as there is host memory for are copied at once. The others wait for memory that is given
    back, behind every get that waits, at most until the deadline; until then the blocks are in use.
    """

    is_put = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._num_read = 0
        """Pieces whose copies were queued."""
        self._handing_over = threading.Lock()
        """Held while pages go to the store: a removal finds them either here or there."""

    def queue(self) -> None:
        """What the thread that asks queues next for the device runs after the pages that are copied at once;
        where these are all of the request, the blocks may be used again."""
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
        finally:  # some copies may be queued though others could not be
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
        """Pages are removed: if some of these have not reached the store, none of the request are put.

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
