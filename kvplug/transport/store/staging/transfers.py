"""Requests for pages whose memory is on a device: what each waits for, and does next.

The thread of :class:`~kvplug.transport.store.staging.store.StagedStore` calls :meth:`Transfer.step` again and
again. It never waits for the device: marks say what has run there.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug.errors import ClosedError
from kvplug.net.streams import DeviceMark, on_stream
from kvplug.transport.store.cache_blocks import PageBlocks
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.results import MissReason, PutReason
from kvplug.transport.store.staging.memory import PinnedMemory
from kvplug.transport.store.staging.pages import StagedPages, queue_gather, queue_scatter
from kvplug.transport.store.store import PageRequest, Store

if TYPE_CHECKING:
    import torch

_PUT_REASONS: Final = {
    MissReason.TIMEOUT: PutReason.TIMEOUT,
    MissReason.CANCELLED: PutReason.CANCELLED,
    MissReason.CLOSED: PutReason.CLOSED,
    MissReason.NO_MEMORY: PutReason.NO_MEMORY,
}


@attrs.define(eq=False)
class Lane:
    """What transfers of one direction share on one device."""

    device: torch.device
    stream: Any
    memory: PinnedMemory
    wake: Callable[[], None]
    """The thread is to look at the transfer again."""

    def on_device(self) -> Any:
        """A context in which the device is the calling thread's current one: events ask the current one."""
        import torch

        return torch.get_device_module(self.device).device(self.device)

    def mark(self) -> DeviceMark:
        """Behind what was queued on the stream by now."""
        with on_stream(self.stream):
            return DeviceMark(self.device)

    def follow(self, mark: DeviceMark | None) -> None:
        """What is queued on the stream from now on runs after the mark."""
        if mark is not None:
            mark.hold(self.stream)

    def go_before(self, mark: DeviceMark) -> None:
        """What the calling thread queues from now on, on its own stream, runs after the mark."""
        import torch

        mark.hold(torch.get_device_module(self.device).current_stream(self.device))

    def pages(self, form: PageFormat, count: int, waiter: object = None) -> StagedPages | None:
        """Host memory for so many pages; ``None``: not now. The waiter has a turn, before those that only ask
        again."""
        part = self.memory.take(StagedPages.nbytes_of(form, count), waiter)
        return None if part is None else StagedPages(form, count, part)


def part_of(request: PageRequest, pages: range, memory: StagedPages) -> PageRequest:
    """Some pages of a request, in other memory."""
    return attrs.evolve(
        request,
        keys=request.keys[pages.start : pages.stop],
        identities=request.identities[pages.start : pages.stop],
        memory=memory,
    )


class Transfer(abc.ABC):
    """One request."""

    job: Job[Any]
    lane: Lane
    is_on_device: bool = False
    """Whether the device has copies of it to do: then it is looked at often."""

    @abc.abstractmethod
    def step(self) -> bool:
        """Do what can be done now. Returns whether the request is over: nothing of it is under way."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Give the memory back, and settle the job: the device is done with both, or has failed."""

    @abc.abstractmethod
    def failed(self, reason: MissReason) -> list[Any]:
        """The results when the job ends for this reason."""

    def end(self, reason: MissReason) -> None:
        """The job is done, if it was not: nothing more is queued for it. What is under way settles it."""
        self.job.set(self.failed(reason), settled=False)


@attrs.define(eq=False)
class _Piece:
    """Pages of one get that are staged together."""

    pages: range
    staged: StagedPages | None = None
    job: GetJob | None = None
    num_queued: int = 0
    """Layers whose copies to the device were queued."""
    has_failed: bool = False
    """Some copies could not be queued: no more of them are."""
    num_landed: int = 0
    """Layers that are in the cache."""
    marks: deque[tuple[DeviceMark, int]] = attrs.field(factory=deque)
    """Behind each group of queued copies, and the number of layers that have landed then."""
    results: list[MissReason | None] | None = None
    is_over: bool = False


class Get(Transfer):
    """Pages into a cache on a device."""

    job: GetJob

    def __init__(self, store: Store, job: GetJob, request: PageRequest, lane: Lane, max_pages: int) -> None:
        """To be called in the thread that asks.

        Args:
            max_pages: that are staged together.
        """
        assert isinstance(request.memory, PageBlocks)
        self.job = job
        self._store = store
        self._request = request
        self.lane = lane
        self._blocks = request.memory
        self._after = self._blocks.after or DeviceMark(lane.device)
        self._pieces = [
            _Piece(range(at, min(at + max_pages, job.count))) for at in range(0, job.count, max_pages)
        ]
        job.on_cancel(self._cancel)

    def _cancel(self) -> None:
        self.end(MissReason.CANCELLED)
        self.lane.wake()

    def failed(self, reason: MissReason) -> list[MissReason | None]:
        found: list[MissReason | None] = []
        for piece in self._pieces:
            found += [reason] * len(piece.pages) if piece.results is None else piece.results
        return found

    def step(self) -> bool:
        if not self.job.done and self.job.deadline.expired:
            self.end(MissReason.TIMEOUT)
        for piece in self._pieces:
            if not piece.is_over and not self._step(piece):
                break  # the next one is staged when this one has its memory
        self.is_on_device = any(piece.marks for piece in self._pieces)
        if self.job.done:
            self.lane.memory.forget(self)  # what is under way may take long, and others wait behind it
            over = all(piece.is_over or piece.job is None for piece in self._pieces)
            if not self.is_on_device:
                self.job.settle()  # the store may still write into host memory
        else:
            arrived = max((piece.job.progressed_at for piece in self._pieces if piece.job), default=0.0)
            ready = min(piece.num_landed for piece in self._pieces)
            if ready > self.job.num_layers_ready or arrived > self.job.progressed_at:
                self.job.advance(ready)
            over = all(piece.is_over for piece in self._pieces)
        if over:
            self.job.set(self.failed(MissReason.OTHER))
            self.abandon()
        return over

    def abandon(self) -> None:
        self.lane.memory.forget(self)
        for piece in self._pieces:
            staged, piece.staged = piece.staged, None
            if staged is not None:
                self.lane.memory.give_back(staged.memory)
        self.job.settle()

    def _step(self, piece: _Piece) -> bool:
        """Returns whether the piece has its memory."""
        if piece.job is None:
            if self.job.done:
                return False
            staged = self.lane.pages(self._request.series.format, len(piece.pages), self)
            if staged is None:
                return False
            piece.staged = staged
            request = part_of(self._request, piece.pages, staged)
            piece.job = self._store.submit_get(request, timeout=self.job.deadline.remaining())
            piece.job.watch(self.lane.wake)
        inner, staged = piece.job, piece.staged
        assert staged is not None
        has_ended = inner.done and inner.settled  # asked first: what comes meanwhile is queued next time
        if self.job.done:
            inner.cancel()
        else:
            self._queue(piece, inner, staged)
        while piece.marks and piece.marks[0][0].is_passed:
            piece.num_landed = piece.marks.popleft()[1]
        if has_ended and not piece.marks:
            if piece.results is None and not self.job.done:
                piece.results = inner.results()
            piece.is_over = True
            piece.staged = None
            self.lane.memory.give_back(staged.memory)  # for the next piece
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
            self.lane.follow(self._after)
        piece.has_failed = True
        try:
            if runs:
                queue_scatter(staged, self._blocks, piece.pages.start, layers, runs, self.lane.stream)
            piece.has_failed = False
            piece.num_queued = ready
        finally:  # some copies may be queued though others could not be
            piece.marks.append((self.lane.mark(), piece.num_queued))


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


@attrs.define(eq=False)
class _PutPiece:
    """Pages of one put that are staged together."""

    pages: range
    staged: StagedPages | None = None
    mark: DeviceMark | None = None
    """Behind the copies into ``staged``, until the device has come past it."""
    job: Job[PutReason | None] | None = None
    results: list[PutReason | None] | None = None
    is_over: bool = False


class Put(Transfer):
    """Pages out of a cache on a device.

    As many pieces as there is host memory for are copied at once. The others wait for memory that is given
    back, behind every get that waits, at most until the deadline; until then the blocks are in use.
    """

    job: Job[PutReason | None]

    def __init__(
        self, store: Store, job: Job[PutReason | None], request: PageRequest, lane: Lane, max_pages: int
    ) -> None:
        """``max_pages``: that are staged together."""
        assert isinstance(request.memory, PageBlocks)
        self.job = job
        self._store = store
        self._request = request
        self.lane = lane
        self._blocks = request.memory
        self._pieces = [
            _PutPiece(range(at, min(at + max_pages, job.count))) for at in range(0, job.count, max_pages)
        ]
        self._num_read = 0
        """Pieces whose copies were queued."""
        self._lock = threading.RLock()
        """Held while pages go to the store: a removal finds them either here or there."""
        job.on_cancel(self._cancel)

    def begin(self) -> None:
        """To be called in the thread that asks. What that queues next for the device runs after the pages
        that are copied at once; where these are all of the request, the blocks may be used again.

        Raises:
            RuntimeError: the device failed, or has no memory.
        """
        self.lane.follow(self._blocks.after)
        self.lane.follow(DeviceMark(self.lane.device))
        if all(map(self._gather, self._pieces)):
            self.lane.go_before(self.lane.mark())
            self.job.allow_reuse()

    def _gather(self, piece: _PutPiece) -> bool:
        """Queue the copies of a piece. Returns whether there was memory for it."""
        piece.staged = self.lane.pages(self._request.series.format, len(piece.pages))
        if piece.staged is None:
            return False
        try:
            queue_gather(piece.staged, self._blocks, piece.pages.start, self.lane.stream)
        finally:  # some copies may be queued though others could not be
            piece.mark = self.lane.mark()
            self.is_on_device = True
        self._num_read += 1
        return True

    def _cancel(self) -> None:
        self.end(MissReason.CANCELLED)
        self.lane.wake()

    def failed(self, reason: MissReason) -> list[PutReason | None]:
        found: list[PutReason | None] = []
        for piece in self._pieces:
            why = _PUT_REASONS.get(reason, PutReason.OTHER)
            if reason is MissReason.TIMEOUT and piece.staged is None:
                why = PutReason.NO_MEMORY
            found += [why] * len(piece.pages) if piece.results is None else piece.results
        return found

    def forget(self, keys: frozenset[bytes] | None) -> None:
        """Pages are removed: if some of these have not reached the store, none of the request are put.

        ``None``: every page is removed.
        """
        with self._lock:
            for piece in self._pieces:
                mine = self._request.keys[piece.pages.start : piece.pages.stop]
                if piece.job is None and (keys is None or not keys.isdisjoint(mine)):
                    self._cancel()

    def step(self) -> bool:
        if not self.job.done and self.job.deadline.expired:
            self.end(MissReason.TIMEOUT)
        for piece in self._pieces:
            if not piece.is_over and not self._step(piece):
                break  # the next one is staged when this one has its memory
        self.is_on_device = any(piece.mark is not None for piece in self._pieces)
        if not self.is_on_device and (self.job.done or self._num_read == len(self._pieces)):
            self.job.settle()
        over = all(piece.is_over or (self.job.done and piece.staged is None) for piece in self._pieces)
        if over:
            self.job.set(self.failed(MissReason.OTHER))
            self.abandon()
        return over

    def _step(self, piece: _PutPiece) -> bool:
        """Returns whether the piece has its memory."""
        if piece.staged is None and (self.job.done or not self._gather(piece)):
            return False
        if piece.mark is not None:
            if not piece.mark.is_passed:
                return True
            piece.mark = None
        assert piece.staged is not None
        with self._lock:
            if piece.job is None and not self.job.done:
                request = part_of(self._request, piece.pages, piece.staged)
                piece.job = self._store.submit_put(request, timeout=self.job.deadline.remaining())
                piece.job.watch(self.lane.wake)
        inner = piece.job
        if inner is not None:
            if self.job.done:
                inner.cancel()
            if not (inner.done and inner.settled):
                return True
            piece.results = inner.results()
        piece.is_over = True
        self._give_back(piece)  # for the next piece
        return True

    def _give_back(self, piece: _PutPiece) -> None:
        staged, piece.staged = piece.staged, None
        if staged is not None:
            self.lane.memory.give_back(staged.memory)

    def abandon(self) -> None:
        for piece in self._pieces:
            self._give_back(piece)
        self.job.settle()
        for piece in self._pieces:
            if piece.job is None:
                with contextlib.suppress(ClosedError):
                    self._store.withdraw(self._request.keys[piece.pages.start : piece.pages.stop])
