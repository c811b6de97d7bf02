"""Requests for pages in memory on a device, in pieces that pass through pinned host memory, or are written
straight into memory of the store.

Each step of a request moves one piece, and waits for the store and for the device. The job is done at its
deadline whatever its steps wait for, and settles when the last copy on the device has ended.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug.errors import ClosedError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.streams import DeviceMark, on_stream
from kvplug.transport.store.cache_blocks import PageBlocks, fits_rows, have_same_views
from kvplug.transport.store.engine import JobTask
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.memory import ReservedPages
from kvplug.transport.store.results import MissReason, PutReason
from kvplug.transport.store.staging.memory import (
    PinnedMemory,
    StagedPages,
    queue_gather,
    queue_gather_rows,
    queue_scatter,
)
from kvplug.transport.store.store import PageRequest, Store

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_ROWS_BYTES: Final = 64 << 20
"""Bytes of the pages that are gathered at once for memory of a store: as many as fit, and at least one."""

_written: Final[set[ReservedPages | StagedPages]] = set()
"""Host memory that devices may still write. What is in here is neither reused nor unmapped."""


@attrs.define(eq=False)
class Lane:
    """The stream and memory that transfers of one direction share on one device."""

    device: torch.device
    stream: Any
    memory: PinnedMemory
    _scratch: torch.Tensor | None = None
    """Memory on the device for one layer of the pages that are gathered."""
    _rows: torch.Tensor | None = None
    """Memory on the device for all layers of pages that are gathered for memory of a store."""
    _rows_of: tuple[PageFormat, int] | None = None
    """The pages that it was used for, and their pitch."""
    _has_no_rows: bool = False
    """Whether the device has no memory for it."""
    _gathering: threading.Lock = attrs.field(factory=threading.Lock)

    def gather(self, staged: StagedPages, sources: Sequence[tuple[PageBlocks, range]]) -> None:
        """Queue copies of several sequences' pages into host memory. After an error some may be queued.

        Raises:
            RuntimeError: the device failed, or has no memory.
        """
        import torch

        with self._gathering:
            nbytes = len(staged.layer(0))
            if self._scratch is None or len(self._scratch) < nbytes:
                with on_stream(self.stream):
                    self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            queue_gather(staged, sources, self._scratch, self.stream)

    def make_rows(self, nbytes: int) -> bool:
        """Return whether :meth:`gather_rows` has that much memory on the device."""
        import torch

        with self._gathering:
            is_short = self._rows is None or len(self._rows) < nbytes
            if is_short and not self._has_no_rows:
                try:
                    with on_stream(self.stream):
                        self._rows = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                    self._rows_of = None
                except RuntimeError as e:
                    self._has_no_rows = True
                    _log.warning("pages are staged, since %s lacks %d bytes: %s", self.device, nbytes, str(e))
            return not self._has_no_rows

    def gather_rows(
        self, reserved: Sequence[ReservedPages], sources: Sequence[tuple[PageBlocks, range]]
    ) -> None:
        """Queue copies of several sequences' pages into memory of a store, after :meth:`make_rows`. After an
        error some may be queued.

        Raises:
            RuntimeError: the device failed.
        """
        with self._gathering:
            assert self._rows is not None
            rows_of = reserved[0].format, reserved[0].pitch
            if self._rows_of != rows_of:  # there must be zeros between the pages
                with on_stream(self.stream):
                    self._rows.zero_()
                self._rows_of = rows_of
            queue_gather_rows(reserved, sources, self._rows, self.stream)

    def on_device(self) -> Any:
        """Return a context that makes this the calling thread's current device, as queries of events need."""
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
        """Return host memory for ``count`` pages, or ``None`` if none is free. With ``waiter``, wait for it,
        ahead of callers without one; ``None`` if the waiter's job ends first."""
        part = self.memory.take(StagedPages.nbytes_of(form, count), waiter)
        return None if part is None else StagedPages(form, count, part)


@attrs.define(eq=False)
class _Piece:
    """Pages of one request that are staged together."""

    pages: range
    staged: StagedPages | ReservedPages | None = None
    """The host memory, or the store's own memory, that has them."""
    job: Any = None
    """The store's job, or ``None`` if it was not submitted yet."""
    error: Exception | None = None
    """For a put: why some of its copies could not be queued."""
    mark: DeviceMark | None = None
    """For a put: the end of its copies on the device."""
    is_read: bool = False
    """For a put: whether they have certainly ended."""
    num_landed: int = 0
    """For a get: number of layers that are in the cache."""


class StagedGetJob(GetJob):
    """A get whose pages are read by jobs of the store, one for each piece."""

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
        self.max_pages = max_pages
        self.pieces = self._cut(range(job.count))
        super().__init__(job, len(self.pieces))
        self.lane = lane
        self._store = store
        self._request = request
        self._blocks = request.memory

    def _cut(self, pages: range) -> list[_Piece]:
        return [_Piece(pages[at : at + self.max_pages]) for at in range(0, len(pages), self.max_pages)]

    @abc.abstractmethod
    def queue(self) -> None:
        """Make the request's device work run after what the calling thread, which submits it, has queued.

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
        """Return why a job ends if the device or the store fails with this error."""
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
        """Make the store's job for this piece end with this task's job."""
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
        if isinstance(staged, StagedPages):
            self.lane.memory.give_back(staged.memory)
        elif staged is not None:
            self._store.free(staged)

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
        staged = piece.staged = self.lane.pages(self._request.series.format, len(piece.pages), self)
        if staged is None:
            return
        try:
            self._follow(piece, self._store._get(self._part(piece), self.job.deadline.remaining()))
            while piece.num_landed < self._request.series.format.num_layers:
                piece.job.wait_for_layer(piece.num_landed)
                self._land(piece, staged)
            self.job.verify_seconds += piece.job.verify_seconds
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
            except Exception as e:  # some copies may be queued, and take long
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

    :func:`stage_together` queues the copies of the first pages, for which the store has reserved its own
    memory, and of as many others as there is pinned memory for. The rest waits, behind every waiting get,
    until memory is given back, at most until the deadline. The job settles when the device has read all
    pages. Other work of the device does not wait for that, unless the caller takes the blocks back.
    """

    is_put = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.job.on_take_back(self._take_back)
        self._num_staged = self._num_read = 0
        """Numbers of pieces whose copies were queued, and of pieces whose copies have ended."""
        self._reading = contextlib.ExitStack()
        """Open while the device has copies to do, so that the job does not settle."""
        self._handing_over = threading.RLock()
        """Held while pages go to the store, so that a removal finds them either here or in the store."""

    def queue(self) -> None:
        self.lane.wait_for(self._blocks.after)
        self.lane.wait_for(DeviceMark(self.lane.device))
        if fits_rows(self._blocks):
            self._reserve()

    def _reserve(self) -> None:
        """Ask the store for memory for as many of the pages as it has."""
        pieces, begin, count = list[_Piece](), 0, self.job.count
        while begin < count:
            reserved = self._store._reserve(self._request, range(begin, min(begin + self.max_rows, count)))
            if reserved is None:
                break
            if not self.lane.make_rows(self.max_rows * reserved.pitch):
                self._store.free(reserved)
                break
            pieces.append(_Piece(range(begin, begin + len(reserved)), reserved))
            begin += len(reserved)
        self.pieces = [*pieces, *self._cut(range(begin, count))]
        self._num_steps = len(self.pieces)

    @property
    def form(self) -> PageFormat:
        """The format of its pages."""
        return self._request.series.format

    def unstaged(self) -> range:
        """With the lock: return the pages that wait for host memory."""
        if self.is_over or self._num_staged == len(self.pieces):
            return range(0)
        return range(self.pieces[self._num_staged].pages.start, self.job.count)

    @property
    def max_rows(self) -> int:
        """How many pages are gathered together for memory of the store."""
        return min(self.max_pages, max(1, _ROWS_BYTES // self.form.nbytes))

    def reserved(self) -> tuple[range, ReservedPages | None]:
        """With the lock: return the pages of the next piece, and the store's memory for it, if it has any."""
        piece = self.pieces[self._num_staged]
        return piece.pages, piece.staged if isinstance(piece.staged, ReservedPages) else None

    def has_views_of(self, other: Put) -> bool:
        """Whether both are puts out of the same views of a cache."""
        return have_same_views(self._blocks, other._blocks)

    def begin_reading(self, pages: range, staged: StagedPages | ReservedPages) -> tuple[PageBlocks, range]:
        """With the lock: make these pages, whose copies are about to be queued, the next piece. Returns their
        source."""
        if self._num_read == self._num_staged:
            self._reading.enter_context(self.copying())
        _written.add(staged)
        if not isinstance(staged, ReservedPages):  # else the piece is there already
            rest = self._cut(range(pages.stop, self.job.count))
            self.pieces[self._num_staged :] = [_Piece(pages, staged), *rest]
            self._num_steps = len(self.pieces)
        return self._blocks, pages

    def copies_queued(self, mark: DeviceMark | None, error: Exception | None) -> None:
        """With the lock: note that the next piece's copies end with the mark, so that its step can begin.
        With an error some copies are missing, and the step only gives the memory back."""
        piece = self.pieces[self._num_staged]
        piece.mark, piece.error = mark, error
        self._num_staged += 1

    def _take_back(self) -> None:
        """Give up the pages that wait for memory, and make what the calling thread queues next run after the
        copies of the other pages."""
        with self.lock:
            given_up = self.unstaged()
            for at in given_up:
                self.note(at, PutReason.CANCELLED)
            dropped = self.pieces[self._num_staged :] if given_up else []
            if given_up:
                del self.pieces[self._num_staged :]
                self._num_steps = len(self.pieces)
            is_read, is_finished = self._num_read == self._num_staged, self.is_finished()
            copied = None if is_read else self.pieces[self._num_staged - 1].mark
        if copied is not None:
            self.lane.make_caller_wait_for(copied)
        for piece in dropped:
            self._give_back(piece)
        if given_up:
            self._store.withdraw(self._request.keys[given_up.start : given_up.stop])
        if is_finished:
            self.end(None)
        elif is_read:
            self.job.settle()

    def has_steps(self) -> bool:
        return self._begun < self._num_staged  # also when the job is over: the steps give memory back

    def do(self, step: int) -> None:
        piece = self.pieces[step]
        try:
            try:
                if piece.mark is not None:
                    piece.mark.wait()
                    piece.is_read = True
            finally:
                self._note_read()
            if piece.error is not None:
                raise piece.error
            with self._handing_over:
                if self.is_over:
                    return
                self._follow(piece, self._store._put(self._part(piece), self.job.deadline.remaining()))
            self._note_results(piece)
        finally:
            self._give_back(piece)

    def _give_back(self, piece: _Piece) -> None:
        if piece.staged is not None and piece.is_read:
            _written.discard(piece.staged)
        if piece.staged not in _written:  # else the device has failed, or an interrupt came
            super()._give_back(piece)

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
        for piece in self.pieces[self._num_staged :]:  # which have no steps
            self._give_back(piece)
        super().ended()


def stage_together(puts: Sequence[Put]) -> dict[Put, Exception]:
    """For all puts at once, queue copies of all pages for which the store has memory, and of as many others
    as there is pinned memory for.

    Only one thread at a time may call this. Afterwards the steps of the queued pieces can begin.

    Args:
        puts: puts of pages of one format, with the same lane, in the order in which they are served.

    Returns:
        For each put whose copies failed on the device, the error. The put's job must end.
    """
    failed: dict[Put, Exception] = {}
    with contextlib.ExitStack() as locks:
        for put in puts:
            locks.enter_context(put.lock)
        while True:
            left = [put for put in puts if put not in failed and put.unstaged()]
            reserved = _reserved_batch(left)
            staged, rest = (None, []) if reserved else _staged_batch(left)
            batch: Sequence[tuple[Put, range, ReservedPages | StagedPages]] = reserved or rest
            if not batch:
                return failed
            lane, mark, error = puts[0].lane, None, None
            try:
                try:
                    sources = [put.begin_reading(pages, memory) for put, pages, memory in batch]
                    if staged is None:
                        lane.gather_rows([memory for _, _, memory in reserved], sources)
                    else:
                        lane.gather(staged, sources)
                finally:  # some copies may be queued even if others could not be
                    mark = lane.mark()
            except Exception as e:
                error = e.with_traceback(None)  # whose frames would keep the store's memory
                failed.update(dict.fromkeys((put for put, _, _ in batch), error))
            except BaseException as e:
                error = RuntimeError(f"interrupted by {e!r}")
                raise
            finally:
                for put, _, _ in batch:
                    put.copies_queued(mark, error)


def _reserved_batch(puts: Sequence[Put]) -> list[tuple[Put, range, ReservedPages]]:
    """Return pages for which the store has reserved memory, and which one call can gather."""
    batch: list[tuple[Put, range, ReservedPages]] = []
    room = puts[0].max_rows if puts else 0
    for put in puts:
        pages, memory = put.reserved()
        if memory is None or len(pages) > room:
            continue
        first, _, like = batch[0] if batch else (put, pages, memory)
        if put.has_views_of(first) and memory.pitch == like.pitch:
            batch.append((put, pages, memory))
            room -= len(pages)
    return batch


def _staged_batch(puts: Sequence[Put]) -> tuple[StagedPages | None, list[tuple[Put, range, StagedPages]]]:
    """Return a piece of pinned memory, and the pages that share it."""
    chosen: list[tuple[Put, range]] = []
    room = puts[0].max_pages if puts else 0
    for put in puts:
        if pages := put.unstaged()[:room]:
            chosen.append((put, pages))
            room -= len(pages)
    count = sum(len(pages) for _, pages in chosen)
    staged = puts[0].lane.pages(puts[0].form, count) if chosen else None
    if staged is None:
        return None, []
    puts[0].lane.memory.share(staged.memory, len(chosen))
    ends = accumulate(len(pages) for _, pages in chosen)
    return staged, [
        (put, pages, staged.part_of(range(end - len(pages), end)))
        for (put, pages), end in zip(chosen, ends, strict=True)
    ]
