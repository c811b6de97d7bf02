"""The memory of a message's bytes, described for the compiled steps."""

from __future__ import annotations

import ctypes
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
        """Memory by rows; ``None`` if a row is not contiguous."""
        rows = blocks.rows_in_memory()
        if rows is None:
            return None
        ids = blocks.block_ids
        bases, strides = (array("q", column) for column in zip(*rows, strict=True))
        struct = library.SpanStruct(
            bases=bases.buffer_info()[0],
            strides=strides.buffer_info()[0],
            ids=ids.buffer_info()[0],
            num_ids=len(ids),
            row_bytes=blocks.row_bytes,
        )
        return cls(struct, bases, strides, ids)
