"""Pages in host memory on their way between a store and a device, and the copies to and from the cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from kvplug.net.streams import on_stream
from kvplug.net.wire.tensors import memory_of_writable
from kvplug.transport.store.cache_blocks import PageBlocks
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.memory import FlatPages, PagePlaces

if TYPE_CHECKING:
    from torch import Tensor

_ALIGN: Final = 16
"""Where each part begins: at a multiple of the size of every dtype."""


class StagedPages(FlatPages):
    """Pages in one piece of host memory: layer after layer, part after part, page after page.

    So a layer of all pages is one copy to or from a device, where each of its parts is one tensor. In a store
    a page is one piece; the store's copy into this memory, or out of it, changes the order.
    """

    def __init__(self, form: PageFormat, count: int, memory: Tensor) -> None:
        """``memory``: :meth:`nbytes_of` bytes, of any content."""
        self.format = form
        self.memory = memory
        self._count = count
        *self._starts, self._step = _starts(form, count)

    @staticmethod
    def nbytes_of(form: PageFormat, count: int) -> int:
        """Bytes of memory for so many pages."""
        return form.num_layers * _starts(form, count)[-1]

    @classmethod
    def most_in(cls, form: PageFormat, nbytes: int) -> int:
        """How many pages so much memory has room for."""
        count = nbytes // form.nbytes
        while count and cls.nbytes_of(form, count) > nbytes:
            count -= 1
        return count

    def __len__(self) -> int:
        return self._count

    def layer(self, layer: int) -> Tensor:
        """The bytes of one layer of all pages."""
        return self.memory[layer * self._step : (layer + 1) * self._step]

    def part(self, layer: Tensor, part: int, pages: range) -> Tensor:
        """The bytes of one part of consecutive pages, in a tensor with one layer of all pages."""
        begin, nbytes = self._starts[part], self.format.spans[part][1]
        return layer[begin + pages.start * nbytes : begin + pages.stop * nbytes]

    def places(self) -> PagePlaces | None:
        form, base, count = self.format, self.memory.data_ptr(), self._count
        bases, ids = array("q"), array("q")
        for layer in range(form.num_layers):
            bases.extend(base + layer * self._step + start for start in self._starts)
        for _ in range(form.num_layers):
            for _, nbytes in form.spans:
                ids.extend(range(0, count * nbytes, nbytes))
        return self._places(bases, ids, count)

    def _pieces(self, page: int) -> Sequence[memoryview]:
        memory = memory_of_writable(self.memory)
        return [
            memory[layer * self._step + start + page * nbytes :][:nbytes]
            for layer in range(self.format.num_layers)
            for start, (_, nbytes) in zip(self._starts, self.format.spans, strict=True)
        ]


def _starts(form: PageFormat, count: int) -> list[int]:
    """Where the parts of a layer of all pages begin, and where the layer ends."""
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
    """Queue copies of these layers of staged pages into the cache.

    Args:
        first: the number in ``blocks`` of the first staged page.
        runs: the staged pages that are copied.
        stream: on the cache's device.
    """
    with on_stream(stream):
        movers = [(run, blocks.mover(first + run.start, len(run), into_cache=True)) for run in runs]
        for layer in layers:
            on_device = staged.layer(layer).to(blocks.device, non_blocking=True)
            for part in range(len(staged.format.parts)):
                for run, move in movers:
                    move(layer, part, staged.part(on_device, part, run))


def queue_gather(staged: StagedPages, blocks: PageBlocks, first: int, stream: Any) -> None:
    """Queue copies out of the cache into all staged pages, from page ``first`` of ``blocks`` on."""
    import torch

    pages = range(len(staged))
    with on_stream(stream):
        move = blocks.mover(first, len(staged), into_cache=False)
        for layer in range(staged.format.num_layers):
            here = staged.layer(layer)
            on_device = torch.empty(len(here), dtype=torch.uint8, device=blocks.device)
            for part in range(len(staged.format.parts)):
                move(layer, part, staged.part(on_device, part, pages))
            here.copy_(on_device, non_blocking=True)
