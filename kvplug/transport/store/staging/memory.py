"""Pinned host memory that pages pass through between stores and devices, and the copies to and from it."""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvplug.net.streams import on_stream, pinned_bytes
from kvplug.transport.store.cache_blocks import PageBlocks, gather_rows, gatherer
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.memory import PageMemory, PagePlaces, ReservedPages, begins_of, flat_parts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvplug.transport.store.engine import JobTask

_LENT_ALIGN: Final = 256
_ALIGN: Final = 16
"""Each part begins at a multiple of this, which is a multiple of the size of every dtype."""


class PinnedMemory:
    """One piece of pinned memory, handed out in blocks. It is allocated once, since allocation is slow.

    Requests that wait are served in order, and before requests that do not wait. Copies to or from a block
    must end before the block is given back, since it may be handed out again at once.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._whole: Tensor | None = None
        self._free: list[tuple[int, int]] = []
        """The beginning and end of each free block, in order."""
        self._shares: dict[int, int] = {}
        """By the beginning of each shared block, the number of users that have not given it back."""
        self._waiting: deque[JobTask] = deque()
        self._users: weakref.WeakSet[PinnedMemory.User] = weakref.WeakSet()

    class User(Protocol):
        """An object that takes memory without waiting for it."""

        def note_free_memory(self) -> None:
            """Called when there may be free memory. Must not block."""

    def prepare(self, device: torch.device, user: PinnedMemory.User) -> None:
        """Allocate the memory on the first call. From now on, notify ``user`` when memory may be free.

        Raises:
            RuntimeError: the device's driver cannot allocate it.
        """
        with self._lock:
            self._users.add(user)
            if self._whole is None:
                self._whole = pinned_bytes(self.nbytes, device)
                self._free = [(0, self.nbytes)]

    def take(self, nbytes: int, waiter: JobTask | None = None) -> Tensor | None:
        """Return an uninitialised block, or ``None`` if none is free.

        With ``waiter``, wait for a block, first come first served. ``None`` then means that the waiter's job
        has ended.
        """
        with self._lock:
            if waiter is None:
                return None if self._waiting else self._lend(nbytes)
            self._waiting.append(waiter)
            try:
                while not waiter.is_over:
                    if self._waiting[0] is waiter and (found := self._lend(nbytes)) is not None:
                        return found
                    self._changed.wait()
            finally:
                self._waiting.remove(waiter)
                self._changed.notify_all()
        self._call_users()
        return None

    def _lend(self, nbytes: int) -> Tensor | None:
        for at, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                taken = min(end, begin + -(-nbytes // _LENT_ALIGN) * _LENT_ALIGN)
                self._free[at : at + 1] = [(taken, end)] if taken < end else []
                assert self._whole is not None
                return self._whole[begin : begin + nbytes]
        return None

    def share(self, part: Tensor, num_users: int) -> None:
        """Share a block: it becomes free once ``num_users`` users have given it back."""
        with self._lock:
            self._shares[part.storage_offset()] = num_users

    def give_back(self, part: Tensor) -> None:
        begin = part.storage_offset()
        end = min(self.nbytes, begin + -(-part.numel() // _LENT_ALIGN) * _LENT_ALIGN)
        with self._lock:
            left = self._shares.pop(begin, 1) - 1
            if left:
                self._shares[begin] = left
                return
            merged: list[tuple[int, int]] = []
            for one in sorted([*self._free, (begin, end)]):
                if merged and merged[-1][1] == one[0]:
                    merged[-1] = (merged[-1][0], one[1])
                else:
                    merged.append(one)
            self._free = merged
        self.wake()

    def wake(self) -> None:
        """Wake the waiters: memory was given back, or the job of a waiter has ended."""
        with self._lock:
            self._changed.notify_all()
        self._call_users()

    def _call_users(self) -> None:
        with self._lock:
            users = [] if self._waiting else list(self._users)
        for user in users:
            user.note_free_memory()


class StagedPages(PageMemory):
    """Pages in one piece of host memory: layer after layer, part after part, page after page.

    In this order, one layer of all pages is contiguous, so a single copy moves it to or from a device. In a
    store, each page is contiguous instead: the store reorders the bytes when it copies a page into this
    memory or out of it.
    """

    def __init__(self, form: PageFormat, count: int, memory: Tensor, pages: range | None = None) -> None:
        """
        Args:
            count: how many pages the memory holds.
            memory: uninitialised memory of :meth:`nbytes_of` bytes.
            pages: the pages in the memory that this object contains; by default all.
        """
        self.format = form
        self.memory = memory
        self.count = count
        self._pages = range(count) if pages is None else pages
        *self._starts, self._step = _starts(form, count)

    @staticmethod
    def nbytes_of(form: PageFormat, count: int) -> int:
        """Return how many bytes of memory ``count`` pages need."""
        return form.num_layers * _starts(form, count)[-1]

    @classmethod
    def most_in(cls, form: PageFormat, nbytes: int) -> int:
        """Return how many pages ``nbytes`` bytes of memory can hold."""
        count = nbytes // form.nbytes
        while count and cls.nbytes_of(form, count) > nbytes:
            count -= 1
        return count

    def __len__(self) -> int:
        return len(self._pages)

    def part_of(self, pages: range) -> StagedPages:
        """Return some of the pages, in the same memory."""
        return StagedPages(self.format, self.count, self.memory, pages)

    def layer(self, layer: int) -> Tensor:
        """Return one layer of all pages, as a view of the memory."""
        return self.memory[layer * self._step : (layer + 1) * self._step]

    def parts_of(self, layer: Tensor) -> list[Tensor]:
        """Split ``layer``, a tensor with one layer of all pages, into its parts."""
        return [self.part(layer, part, range(self.count)) for part in range(len(self.format.parts))]

    def part(self, layer: Tensor, part: int, pages: range) -> Tensor:
        """Return one part of some consecutive pages, as a view of a tensor with one layer of all pages."""
        begin, nbytes = self._starts[part], self.format.spans[part][1]
        return layer[begin + pages.start * nbytes : begin + pages.stop * nbytes]

    def places(self) -> PagePlaces:
        form, base = self.format, self.memory.data_ptr()
        parts = flat_parts(
            (base + layer * self._step + start, nbytes, nbytes)
            for layer in range(form.num_layers)
            for start, (_, nbytes) in zip(self._starts, form.spans, strict=True)
        )
        return PagePlaces(parts, array("q", self._pages), 0, begins_of(form), len(self._pages))


def _starts(form: PageFormat, count: int) -> list[int]:
    """Return the offsets in a layer of all pages at which its parts begin, and its length."""
    sizes = (-(-count * nbytes // _ALIGN) * _ALIGN for _, nbytes in form.spans)
    return list(accumulate(sizes, initial=0))


def queue_scatter(
    staged: StagedPages,
    blocks: PageBlocks,
    first: int,
    layers: Iterable[int],
    runs: Sequence[range],
    stream: Any,
) -> None:
    """Queue copies of some layers of staged pages into the cache.

    Args:
        first: the index in ``blocks`` of the first staged page.
        runs: the staged pages to copy.
        stream: a stream on the cache's device.
    """
    with on_stream(stream):
        movers = [(run, blocks.mover(first + run.start, len(run), into_cache=True)) for run in runs]
        for layer in layers:
            on_device = staged.layer(layer).to(blocks.device, non_blocking=True)
            for part in range(len(staged.format.parts)):
                for run, move in movers:
                    move(layer, part, staged.part(on_device, part, run))


def queue_gather(
    staged: StagedPages, sources: Sequence[tuple[PageBlocks, range]], scratch: Tensor, stream: Any
) -> None:
    """Queue copies from a cache into all staged pages.

    Each layer is gathered in ``scratch`` on the device, in one operation if the cache allows it, and then
    copied to the host in one operation.

    Args:
        sources: the pages to copy, in the order of the staged pages. They may belong to several sequences.
        scratch: memory on the device for one layer of all pages. Only this stream may use it.
    """
    with on_stream(stream):
        gather = gatherer(sources)
        for layer in range(staged.format.num_layers):
            here = staged.layer(layer)
            on_device = scratch[: len(here)]
            gather(layer, staged.parts_of(on_device))
            here.copy_(on_device, non_blocking=True)


def queue_gather_rows(
    reserved: Sequence[ReservedPages],
    sources: Sequence[tuple[PageBlocks, range]],
    scratch: Tensor,
    stream: Any,
) -> None:
    """Queue copies from a cache into memory of a store: for each layer one operation that gathers all pages
    on the device, if the cache allows it, and then one copy for each run of adjacent rows.

    Args:
        reserved: the memory for the pages of each source, all with the same pitch.
        scratch: memory on the device for as many rows, with zeros between the pages, used by this stream
            only.
    """
    import torch

    pitch, nbytes = reserved[0].pitch, reserved[0].format.nbytes
    with on_stream(stream):
        gather_rows(sources, scratch, pitch)
        first = 0
        for buffer, begin, count in _runs_of(reserved):
            length = (count - 1) * pitch + nbytes
            there = torch.frombuffer(buffer, dtype=torch.uint8, offset=begin, count=length)
            there.copy_(scratch[first * pitch : first * pitch + length], non_blocking=True)
            first += count


def _runs_of(reserved: Sequence[ReservedPages]) -> Iterator[tuple[memoryview, int, int]]:
    """Yield the runs of rows that one copy can write: their buffer, the first byte, and their number."""
    buffer, begin, count = memoryview(b""), 0, 0
    for pages in reserved:
        rows = pages.rows()
        for offset in rows.offsets:
            is_next = rows.buffer is buffer and offset == begin + count * pages.pitch
            if count and is_next and offset // pages.piece_bytes == begin // pages.piece_bytes:
                count += 1
                continue
            if count:
                yield buffer, begin, count
            buffer, begin, count = rows.buffer, offset, 1
    yield buffer, begin, count
