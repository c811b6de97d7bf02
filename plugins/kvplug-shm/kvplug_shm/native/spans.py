"""The memory of a message's bytes, described for the compiled steps."""

from __future__ import annotations

import ctypes
import itertools
import operator
from array import array

from kvplug.transport import Blocks
from kvplug_shm.native import library


class Span:
    """Owns the description of the memory, not the memory itself."""

    __slots__ = ("_described", "_struct", "pointer")

    def __init__(self, struct: library.SpanStruct, *described: array[int]) -> None:
        self._struct = struct
        self._described = described
        self.pointer = ctypes.c_void_p(ctypes.addressof(struct))

    @classmethod
    def flat(cls, address: int) -> Span:
        """Contiguous memory."""
        return cls(library.SpanStruct(flat=address))

    @classmethod
    def of_blocks(cls, blocks: Blocks) -> Span | None:
        """Memory by rows; ``None`` if the compiled steps cannot copy it."""
        memory = blocks.memory
        if memory is None or len(memory.counts) > library.MAX_AXES:
            return None
        ids = blocks.block_ids
        *sizes, row_bytes = itertools.accumulate(
            reversed(memory.counts), operator.mul, initial=memory.run_bytes
        )
        axes = sorted(zip(memory.strides, memory.counts, reversed(sizes), strict=True), reverse=True)
        steps, counts, in_message = zip(*axes) if axes else ((), (), ())
        struct = library.SpanStruct(
            bases=memory.bases.buffer_info()[0],
            strides=memory.block_strides.buffer_info()[0],
            ids=ids.buffer_info()[0],
            num_ids=len(ids),
            num_parts=memory.num_parts,
            row_bytes=row_bytes,
            run_bytes=memory.run_bytes,
            num_axes=len(axes),
            slowest=in_message.index(max(in_message)) if axes else 0,
            counts=counts,
            steps=steps,
            in_message=in_message,
        )
        return cls(struct, memory.bases, memory.block_strides, ids)
