"""Blocks of a paged cache, gathered straight into the ring and scattered straight from it.

Whole rows are copied between the cache and a view of the ring, many at a time. A row that the end of a piece
or of the ring splits in two goes through a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvplug import UnsupportedError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import dtype_name
from kvplug.transport import Blocks
from kvplug_shm.memory.pool import Pool
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.content import Content
from kvplug_shm.pipe.header import header_of
from kvplug_shm.pipe.rings import Incoming, Outgoing

if TYPE_CHECKING:
    from torch import Tensor


def _check_device(blocks: Blocks) -> None:
    if blocks.device.type != "cpu":
        raise UnsupportedError(f"the pipe 'shm' moves blocks of CPU tensors, not of {blocks.device} ones")


class BlockContent(Content):
    """A message that is gathered while it is copied. It keeps the caches alive."""

    __slots__ = ("_blocks", "_cut", "_native", "_pool")

    def __init__(self, blocks: Blocks, pool: Pool, *, native: bool) -> None:
        """Raises UnsupportedError: a device or dtype that is not carried."""
        _check_device(blocks)
        super().__init__(None)
        self._blocks: Blocks | None = blocks
        self._pool = pool
        self._native = native
        self._cut = _CutRow(blocks)
        self.header = header_of(blocks.dtype, torch.Size(blocks.shape))

    @property
    def span(self) -> Span | None:
        if self._blocks is None:
            return super().span
        if self._span is None:
            self._span = Span.of_blocks(self._blocks)
        return self._span

    def copy(self, ring: Outgoing, count: int, done: int, nbytes: int) -> None:
        if self._blocks is None:
            super().copy(ring, count, done, nbytes)
            return
        for memory in ring.parts(count, nbytes):
            self._gather(done, memory)
            done += len(memory)

    def leave(self, done: int) -> None:
        """Gather the rest into memory of its own, unless the compiled steps gather it: a daemon thread, which
        Python may end at exit, must not use torch.

        Raises:
            ResourceExhaustedError: there is not enough memory.
        """
        if self._blocks is not None and not (self._native and self.span):
            rest = self._pool.tensor(TensorMeta("uint8", (self.nbytes - done,)))
            self._gather(done, rest)
            self._blocks, self._span = None, None
            self._owner, self.address = rest, rest.data_ptr() - done

    def drop(self) -> None:
        super().drop()
        self._blocks = None

    def _gather(self, done: int, memory: Tensor) -> None:
        blocks = self._blocks
        assert blocks is not None
        for first, whole, skip, part in _rows(blocks.row_bytes, done, memory):
            if whole:
                blocks.gather(first, _as_rows(blocks, part))
            else:
                part.copy_(self._cut.gathered(first)[skip : skip + len(part)])


class BlockTarget:
    """The blocks that a message is scattered into while it arrives."""

    def __init__(self, blocks: Blocks, *, native: bool) -> None:
        """Raises UnsupportedError: a device that is not supported."""
        _check_device(blocks)
        self.blocks = blocks
        self._cut = _CutRow(blocks)
        self.span = Span.of_blocks(blocks) if native else None
        """The rows' memory for the compiled steps; ``None``: only :meth:`take` can copy them."""

    @property
    def meta(self) -> TensorMeta:
        """The meta of the message that fits."""
        return TensorMeta(dtype_name(self.blocks.dtype), self.blocks.shape)

    def take(self, ring: Incoming, count: int, done: int, nbytes: int) -> None:
        """Copy ``nbytes`` from byte ``count`` of the stream on; ``done`` bytes were copied before."""
        for memory in ring.parts(count, nbytes):
            self._scatter(done, memory)
            done += len(memory)

    def fill(self, message: Tensor) -> None:
        """Scatter the whole message from a tensor."""
        if message.numel():
            self._scatter(0, message.view(-1).view(torch.uint8))

    def taken(self, memory: Tensor) -> None:
        """Copy the received bytes back out of the caches into ``memory``."""
        blocks = self.blocks
        for first, whole, skip, part in _rows(blocks.row_bytes, 0, memory):
            if whole:
                blocks.gather(first, _as_rows(blocks, part))
            elif self.span is None:
                part.copy_(self._cut.bytes[skip : skip + len(part)])
            else:
                part.copy_(self._cut.gathered(first)[skip : skip + len(part)])

    def _scatter(self, done: int, memory: Tensor) -> None:
        blocks = self.blocks
        for first, whole, skip, part in _rows(blocks.row_bytes, done, memory):
            if whole:
                blocks.scatter(first, _as_rows(blocks, part))
            else:
                stop = skip + len(part)
                self._cut.bytes[skip:stop] = part
                if stop == blocks.row_bytes:
                    blocks.scatter(first, _as_rows(blocks, self._cut.bytes))


class _CutRow:
    """A row of which only a part has arrived, or is requested."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._row = -1
        self._bytes: Tensor | None = None

    @property
    def bytes(self) -> Tensor:
        if self._bytes is None:
            self._bytes = torch.empty(self._blocks.row_bytes, dtype=torch.uint8)
        return self._bytes

    def gathered(self, row: int) -> Tensor:
        """The bytes of a row."""
        if row != self._row:
            self._blocks.gather(row, _as_rows(self._blocks, self.bytes))
            self._row = row
        return self.bytes


def _as_rows(blocks: Blocks, memory: Tensor) -> Tensor:
    return memory.view(blocks.dtype).view(-1, *blocks.row_shape)


def _rows(row_bytes: int, done: int, memory: Tensor) -> Iterator[tuple[int, bool, int, Tensor]]:
    """The parts of ``memory``, bytes ``done`` and on of a message: (first row, are they whole, skip, part).

    Whole rows come together. Of a row that is not whole the part begins ``skip`` bytes into it.
    """
    at = 0
    while at < len(memory):
        row, skip = divmod(done + at, row_bytes)
        left = len(memory) - at
        whole = skip == 0 and left >= row_bytes
        step = left // row_bytes * row_bytes if whole else min(row_bytes - skip, left)
        yield row, whole, skip, memory[at : at + step]
        at += step
