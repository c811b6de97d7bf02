"""Requests for pages in memory on a device, in pieces that pass through pinned host memory.

Each step of a request is one piece, in a thread that waits for the store and for the device. The job is done
at its deadline whatever its steps wait for, and settles when the last copy on the device has ended.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.errors import ClosedError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.streams import DeviceMark, on_stream
from kvplug.transport.store.cache_blocks import PageBlocks
from kvplug.transport.store.engine import JobTask
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.results import MissReason, PutReason
from kvplug.transport.store.staging.memory import PinnedMemory, StagedPages, queue_gather, queue_scatter
from kvplug.transport.store.store import PageRequest, Store

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


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

    def pages(self, form: PageFormat, count: int, waiter: JobTask | None = None) -> StagedPages | None:
        """Return host memory for ``count`` pages, or ``None`` if none is free. With ``waiter`` wait for it,
        ahead of callers without one; ``None`` if its job ends first."""
        part = self.memory.take(StagedPages.nbytes_of(form, count), waiter)
        return None if part is None else StagedPages(form, count, part)


@attrs.define(eq=False)
class _Piece:
    """Pages of one request that are staged together."""

    pages: range
    staged: StagedPages | None = None
    job: Any = None
    """The store's job, or ``None`` if it was not submitted yet."""
    mark: DeviceMark | None = None
    """For a put: the end of its copies on the device."""
    num_landed: int = 0
    """For a get: layers that are in the cache."""


class StagedGetJob(GetJob):
    """A get whose pages come by other jobs."""

    __slots__ = ("pieces",)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.pieces: Sequence[_Piece] = ()

    @property
    def progressed_at(self) -> float:
        times: list[float] = [piece.job.progressed_at for piece in self.pieces if piece.job]
        return max(times, default=0.0)


class Transfer(JobTask):
    """One request. Each step moves one of its pieces, or only gives its memory back if the job is over."""

    def __init__(self, store: Store, job: Job[Any], request: PageRequest, lane: Lane, max_pages: int) -> None:
        """``max_pages``: how many pages are staged together."""
        assert isinstance(request.memory, PageBlocks)
        self.pieces = [
            _Piece(range(at, min(at + max_pages, job.count))) for at in range(0, job.count, max_pages)
        ]
        super().__init__(job, len(self.pieces))
        self.lane = lane
        self._store = store
        self._request = request
        self._blocks = request.memory

    @abc.abstractmethod
    def queue(self) -> None:
        """Queue the first device work. Called in the thread that submits the request.

        Raises:
            RuntimeError: the device failed, or has no memory.
        """

    def attempt(self, step: int) -> MissReason | None:
        try:
            with self.lane.on_device():
                return super().attempt(step)
        except Exception as e:
            return self.fault(e)

    def fault(self, error: BaseException) -> MissReason:
        """Return the reason of a job that fails with this error of the device or the store."""
        if isinstance(error, ClosedError):
            return MissReason.CLOSED
        _log.warning("staging pages failed: %s", error)
        return MissReason.NO_MEMORY if NamedExhaustion.of(error) else MissReason.OTHER

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

    def _follow(self, piece: _Piece, job: Job[Any]) -> None:
        """Let the store's job end with this one."""
        piece.job = job
        if self.is_over:
            job.cancel()

    def _note_results(self, piece: _Piece) -> None:
        for at, result in zip(piece.pages, piece.job.wait(), strict=True):
            self.note(at, result)

    def _give_back(self, piece: _Piece) -> None:
        """Give a piece's memory back, once the store has stopped using it."""
        if piece.job is not None:
            piece.job.cancel()
            piece.job.wait_settled()
        staged, piece.staged = piece.staged, None
        if staged is not None:
            self.lane.memory.give_back(staged.memory)

    def ended(self) -> None:
        for piece in self.pieces:
            if piece.job is not None:
                piece.job.cancel()
        super().ended()


class Get(Transfer):
    """A transfer of pages into a cache on a device."""

    job: StagedGetJob

    def queue(self) -> None:
        self.job.pieces = self.pieces
        self._after = self._blocks.after or DeviceMark(self.lane.device)

    def do(self, step: int) -> None:
        piece = self.pieces[step]
        piece.staged = self.lane.pages(self._request.series.format, len(piece.pages), self)
        if piece.staged is None:
            return
        try:
            self._follow(piece, self._store._get(self._part(piece), self.job.deadline.remaining()))
            while piece.num_landed < self._request.series.format.num_layers:
                piece.job.wait_for_layer(piece.num_landed)
                self._land(piece, piece.staged)
            self._note_results(piece)
        finally:
            self._give_back(piece)

    def _land(self, piece: _Piece, staged: StagedPages) -> None:
        """Copy the layers that have arrived into the cache."""
        ready = piece.job.num_layers_ready  # read before the results: if all are ready, misses are known
        results = piece.job.results()
        runs = [range(len(piece.pages))] if results is None else _found(results)
        layers = range(piece.num_landed, ready)
        with self.copying():
            self.lane.wait_for(self._after)
            try:
                if runs:
                    queue_scatter(staged, self._blocks, piece.pages.start, layers, runs, self.lane.stream)
            except Exception as e:  # some copies may be queued, and the device may take its time
                self.end(self.fault(e))
            finally:
                self.lane.mark().wait()
        if self.is_over:
            raise JobTask.OverError
        piece.num_landed = ready
        self.job.advance(min(each.num_landed for each in self.pieces))

    def ended(self) -> None:
        super().ended()
        self.lane.memory.wake()


def _found(results: Sequence[MissReason | None]) -> list[range]:
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
        self._num_staged = self._num_read = 0
        """Pieces whose copies were queued, and whose copies have ended."""
        self._reading = contextlib.ExitStack()
        """Open while the device has copies to do, so that the job does not settle."""
        self._handing_over = threading.RLock()
        """Held while pages go to the store, so that a removal finds them either here or there."""

    def queue(self) -> None:
        """Queue copies of the pieces that there is memory for. If these are all pieces, the calling thread's
        next device work runs after the copies, and the blocks are reusable."""
        self.lane.wait_for(self._blocks.after)
        self.lane.wait_for(DeviceMark(self.lane.device))
        self.stage()
        if self._num_staged == len(self.pieces):
            self.lane.make_caller_wait_for(self.lane.mark())
            self.job.allow_reuse()

    def stage(self) -> bool:
        """Queue copies of further pieces that there is memory for. Returns whether there were any.

        Raises:
            RuntimeError: the device failed, or has no memory.
        """
        before = self._num_staged
        with self.lock:
            while not self.is_over and self._num_staged < len(self.pieces):
                piece = self.pieces[self._num_staged]
                piece.staged = self.lane.pages(self._request.series.format, len(piece.pages))
                if piece.staged is None:
                    break
                if self._num_read == self._num_staged:
                    self._reading.enter_context(self.copying())
                try:
                    queue_gather(piece.staged, self._blocks, piece.pages.start, self.lane.stream)
                finally:  # some copies may be queued even if others could not be
                    piece.mark = self.lane.mark()
                    self._num_staged += 1  # its step may begin
        return self._num_staged > before

    def has_steps(self) -> bool:
        return self._begun < self._num_staged  # also when the job is over, until the device has read

    def do(self, step: int) -> None:
        piece = self.pieces[step]
        try:
            try:
                assert piece.mark is not None
                piece.mark.wait()
            finally:
                self._note_read()
            with self._handing_over:
                if self.is_over:
                    return
                self._follow(piece, self._store._put(self._part(piece), self.job.deadline.remaining()))
            self._note_results(piece)
        finally:
            self._give_back(piece)

    def _note_read(self) -> None:
        with self.lock:
            self._num_read += 1
            is_idle = self._num_read == self._num_staged
            reading = self._reading.pop_all() if is_idle else contextlib.ExitStack()
        reading.close()
        if self._num_read == len(self.pieces):
            self.job.settle()

    def final(self, reason: MissReason | None) -> list[PutReason | None]:
        results: list[PutReason | None] = super().final(reason)
        if reason is MissReason.TIMEOUT:
            for piece in self.pieces[self._num_staged :]:
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
            for piece in self.pieces:
                mine = self._request.keys[piece.pages.start : piece.pages.stop]
                if piece.job is None and (keys is None or not keys.isdisjoint(mine)):
                    self.end(MissReason.CANCELLED)

    def ended(self) -> None:
        with self._handing_over, contextlib.suppress(ClosedError):
            for piece in self.pieces:
                if piece.job is None:
                    self._store.withdraw(self._request.keys[piece.pages.start : piece.pages.stop])
        super().ended()
