"""Which part of the arena is used for what: slots of equal size in chunks, chunks in segments.

Pages of one size share *chunks*, which are cut into slots of that size. A chunk is a whole segment, or an
eighth of one where the slots are small. A chunk without pages can serve another size.

Memory that was used before is used again first: the kernel provides a fresh page of memory in ten times the
time that a copy takes.

Pure: no memory, no lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from kvplug_host.arena.segments import WORD
from kvplug_host.eviction import Eviction

_LINE: Final = 64
"""Slots begin on cache lines."""
_PARTS: Final = 8
"""Small chunks in a segment."""
_LEAST_SLOTS: Final = 8
"""In a small chunk; else a chunk is a whole segment."""


class Chunk:
    """A part of a segment, for slots of one size."""

    __slots__ = ("begin", "free", "fresh", "is_held_back", "last_use", "nbytes", "pages", "size", "taken")

    def __init__(self, begin: int, nbytes: int, size: SizeClass) -> None:
        self.begin = begin
        self.nbytes = nbytes
        self.size = size
        self.free: list[int] = []
        """Slots that were used and are free, the last freed one last."""
        self.fresh = 0
        """Slots from this number on have never been used since the chunk was cut."""
        self.taken = 0
        self.pages: dict[int, Any] = {}
        """The index' entry of each slot that holds a page. A slot that is taken and not here is being
        filled, or read although its page was removed."""
        self.last_use = 0
        """The latest use of one of its pages, in the index' count of uses."""
        self.is_held_back = False
        """Its free slots are not handed out, since it is to serve another size."""


class SizeClass:
    """Slots of one size, and the order in which their pages are evicted."""

    def __init__(self, slot_bytes: int, chunk_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.chunk_bytes = chunk_bytes
        self.num_slots = chunk_bytes // slot_bytes
        """In a chunk."""
        self.eviction = Eviction()
        self.num_evictions = 0
        self.chunks: set[Chunk] = set()
        self.with_free: dict[Chunk, None] = {}
        """Chunks with slots that were used and are free."""
        self.with_fresh: dict[Chunk, None] = {}
        self.to_drain: list[Chunk] = []
        """Chunks of other sizes that are to serve this one, once their pages have gone."""
        self.drains_waiting = False
        """Whether these pages go although readers are expected."""

    def new_eviction(self) -> None:
        """All pages are gone, and what was learnt with them."""
        self.eviction = Eviction()

    @property
    def tail_bytes(self) -> int:
        """What is lost at the end of each chunk."""
        return self.chunk_bytes - self.num_slots * self.slot_bytes


class Slot:
    """Memory for one page, exclusively its taker's until it is freed or holds a page."""

    __slots__ = ("chunk", "offset")

    def __init__(self, chunk: Chunk, offset: int) -> None:
        self.chunk = chunk
        self.offset = offset

    @property
    def nbytes(self) -> int:
        """For a page and its header."""
        return self.chunk.size.slot_bytes - WORD

    @property
    def word(self) -> int:
        """Where its generation is."""
        return self.offset + self.chunk.size.slot_bytes - WORD


class SlotTable:
    """The slots of an arena of ``num_segments`` segments.

    ``allocate`` takes the segment of that number into use, and raises ``CapacityError`` if there is no memory
    for it."""

    def __init__(self, num_segments: int, segment_bytes: int, allocate: Callable[[int], None]) -> None:
        self._num_segments = num_segments
        self._segment_bytes = segment_bytes
        self._allocate = allocate
        self._num_used = 0
        """Segments that were taken into use, the first ones."""
        self._whole: list[int] = []
        """Segments that are free, the last used one last."""
        self._parts: dict[int, list[int]] = {}
        """The free parts of each segment that is cut into parts."""
        self.sizes: dict[int, SizeClass] = {}
        self.used_bytes = 0
        """Taken slots, and the tails of the chunks in use."""

    @property
    def budget_bytes(self) -> int:
        return self._num_segments * self._segment_bytes

    def size_for(self, nbytes: int) -> SizeClass | None:
        """The class of slots for so many bytes of page and header; ``None``: no segment holds that much."""
        needed = nbytes + WORD
        # At most a 64th is lost by rounding, so that pages with headers of different lengths share a class.
        step = max(_LINE, 1 << max(0, needed.bit_length() - 7))
        slot_bytes = -(-needed // step) * step
        if slot_bytes > self._segment_bytes:
            slot_bytes = -(-needed // _LINE) * _LINE
        if slot_bytes > self._segment_bytes:
            return None
        found = self.sizes.get(slot_bytes)
        if found is None:
            found = self.sizes[slot_bytes] = SizeClass(slot_bytes, self._chunk_bytes(slot_bytes))
        return found

    def _chunk_bytes(self, slot_bytes: int) -> int:
        part = self._segment_bytes // _PARTS // _LINE * _LINE
        if part // slot_bytes >= _LEAST_SLOTS and part % slot_bytes <= part // 32:
            return part
        return self._segment_bytes

    # -- slots ---------------------------------------------------------------------------------

    def take(self, size: SizeClass) -> Slot | None:
        """A free slot; ``None``: pages have to go first.

        Raises:
            CapacityError: the system has not the memory that the budget allows.
        """
        chunk = next(reversed(size.with_free), None) or next(reversed(size.with_fresh), None)
        if chunk is None and (chunk := self._new_chunk(size)) is None:
            return None
        if chunk.free:
            offset = chunk.free.pop()
            if not chunk.free:
                del size.with_free[chunk]
        else:
            offset = chunk.begin + chunk.fresh * size.slot_bytes
            chunk.fresh += 1
            if chunk.fresh == size.num_slots:
                del size.with_fresh[chunk]
        chunk.taken += 1
        self.used_bytes += size.slot_bytes
        return Slot(chunk, offset)

    def free(self, slot: Slot) -> None:
        """The slot is free. A chunk whose slots are all free can serve another size."""
        chunk, size = slot.chunk, slot.chunk.size
        chunk.taken -= 1
        self.used_bytes -= size.slot_bytes
        if chunk.taken:
            chunk.free.append(slot.offset)
            if not chunk.is_held_back:
                size.with_free[chunk] = None
            return
        size.chunks.discard(chunk)
        size.with_free.pop(chunk, None)
        size.with_fresh.pop(chunk, None)
        self.used_bytes -= size.tail_bytes
        segment, at = divmod(chunk.begin, self._segment_bytes)
        if chunk.nbytes == self._segment_bytes:
            self._whole.append(segment)
            return
        parts = self._parts[segment]
        parts.append(at // chunk.nbytes)
        if len(parts) == _PARTS:
            del self._parts[segment]
            self._whole.append(segment)

    # -- chunks --------------------------------------------------------------------------------

    def _new_chunk(self, size: SizeClass) -> Chunk | None:
        if size.chunk_bytes == self._segment_bytes:
            segment = self._take_segment()
            if segment is None:
                return None
            begin = segment * self._segment_bytes
        else:
            segment = next((each for each, parts in self._parts.items() if parts), None)
            if segment is None:
                if (segment := self._take_segment()) is None:
                    return None
                self._parts[segment] = list(range(_PARTS))[::-1]
            begin = segment * self._segment_bytes + self._parts[segment].pop() * size.chunk_bytes
        chunk = Chunk(begin, size.chunk_bytes, size)
        size.chunks.add(chunk)
        size.with_fresh[chunk] = None
        self.used_bytes += size.tail_bytes
        return chunk

    def _take_segment(self) -> int | None:
        if self._whole:
            return self._whole.pop()
        if self._num_used == self._num_segments:
            return None
        self._allocate(self._num_used)
        self._num_used += 1
        return self._num_used - 1

    def hold_back(self, chunk: Chunk) -> None:
        """Hand out no slots of the chunk, so that it becomes free with its last page."""
        chunk.is_held_back = True
        chunk.size.with_free.pop(chunk, None)
        chunk.size.with_fresh.pop(chunk, None)

    def hand_out(self, chunk: Chunk) -> None:
        """Hand out the slots of the chunk again, if it has not become free."""
        chunk.is_held_back = False
        if chunk.taken and chunk.free:
            chunk.size.with_free[chunk] = None
        if chunk.taken and chunk.fresh < chunk.size.num_slots:
            chunk.size.with_fresh[chunk] = None

    def coldest(self, size: SizeClass, before: float, may_go: Callable[[Chunk], bool]) -> list[Chunk] | None:
        """The chunks of other sizes that make a chunk of this size once their pages are gone.

        Of all that ``may_go``, those whose latest use is longest ago, and earlier than ``before``; ``None``:
        there are none."""
        uses = [(max(chunk.last_use for chunk in chunks), chunks) for chunks in self._candidates(size)]
        for used, chunks in sorted(uses, key=lambda each: each[0]):
            if used >= before:
                break
            if all(not chunk.is_held_back and may_go(chunk) for chunk in chunks):
                return chunks
        return None

    def _candidates(self, size: SizeClass) -> Iterable[list[Chunk]]:
        small: dict[int, list[Chunk]] = {}
        for other in self.sizes.values():
            if other is size:
                continue
            for chunk in other.chunks:
                if chunk.nbytes >= size.chunk_bytes:
                    yield [chunk]
                else:
                    small.setdefault(chunk.begin // self._segment_bytes, []).append(chunk)
        yield from small.values()
