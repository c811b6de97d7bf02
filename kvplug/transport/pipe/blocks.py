"""Blocks of a paged cache as one message: which rows of which tensors, in order."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvplug.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor


class Blocks:
    """The rows ``block_ids`` of each of ``views``, one view after the other.

    A view has a block in each row, as ``cache[:, 0]`` and ``cache[:, 1]`` of a cache ``[blocks, 2, tokens,
    heads, head size]`` have; it need not be contiguous. As a message it is one tensor of the shape
    ``[len(views), len(block_ids), *row]``: what was sent as blocks can be received as a tensor, and the
    other way round.
    """

    def __init__(self, views: Sequence[Tensor], block_ids: Sequence[int]) -> None:
        """Check the views and ids; nothing is copied.

        Raises:
            LayoutError: there is no view, or views differ in shape, dtype or device, or are to be conjugated
                or negated first; a block id is no integer of 64 bits, or no row of the views.
        """
        views = tuple(views)  # which keeps them, whatever becomes of what was given
        if not views:
            raise LayoutError("blocks of no tensor: give at least one view")
        first = views[0]
        for view in views:
            if view.dim() == 0 or view.shape != first.shape:
                raise LayoutError(
                    f"views have blocks of one shape; got {list(first.shape)} and {list(view.shape)}"
                )
            if view.dtype != first.dtype or view.device != first.device:
                raise LayoutError(
                    f"views are of one dtype on one device; got {first.dtype} on {first.device} and"
                    f" {view.dtype} on {view.device}"
                )
            if view.is_conj() or view.is_neg():
                raise LayoutError(
                    "a view's numbers are still to be conjugated or negated: resolve that first"
                )
        try:
            self._ids = array("q", block_ids)
        except (TypeError, OverflowError) as e:
            raise LayoutError(f"block ids are integers of 64 bits: {e}") from e
        if self._ids and not 0 <= min(self._ids) <= max(self._ids) < first.shape[0]:
            wrong = next(each for each in self._ids if not 0 <= each < first.shape[0])
            raise LayoutError(f"block {wrong} is out of range, the cache has {first.shape[0]} blocks")
        self._views = views
        self._copied: _Copied | None = None  # what torch copies, once it does
        self.dtype = first.dtype
        """A ``torch.dtype``."""
        self.device = first.device
        self.row_shape = tuple(first.shape[1:])
        self.row_bytes: int = math.prod(self.row_shape) * first.dtype.itemsize
        self.num_rows = len(views) * len(self._ids)
        self._index: Tensor | None = None  # of the ids, made on first use

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the message."""
        return (len(self._views), len(self._ids), *self.row_shape)

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes

    def check_distinct(self) -> None:
        """Check that the blocks can be written into.

        Raises:
            LayoutError: a block comes twice.
        """
        if len(set(self._ids)) != len(self._ids):
            twice = next(each for each in self._ids if self._ids.count(each) > 1)
            raise LayoutError(f"block {twice} comes twice, and two rows cannot be received into it")

    @property
    def block_ids(self) -> array[int]:
        """The block ids as an array; callers must not change it."""
        return self._ids

    def rows_in_memory(self) -> list[tuple[int, int]] | None:
        """For each view the address of its row 0, and how many bytes further each next one is.

        ``None``: not in the memory of this machine's processor, or rows that are no single piece of it, or
        that lie over each other. The addresses are good for as long as this object is alive.
        """
        if self.device.type != "cpu" or not (self._ids and self.row_bytes):
            return None
        rows = []
        for view in self._views:
            stride = view.stride(0) * view.element_size() if _is_plain(view) else 0
            if stride < self.row_bytes or not view[0].is_contiguous():
                return None
            rows.append((view.data_ptr(), stride))
        return rows

    def runs(self) -> list[Tensor] | None:
        """The blocks of each view as one contiguous tensor; ``None`` if the ids are not consecutive."""
        ids = self._ids
        if not self.nbytes or any(after - before != 1 for before, after in itertools.pairwise(ids)):
            return None
        found = [view.detach()[ids[0] : ids[-1] + 1] for view in self._views]
        return found if all(each.is_contiguous() for each in found) else None

    def empty(self) -> Tensor:
        """New memory for the message."""
        import torch

        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def gathered(self) -> Tensor:
        """The message, as a tensor of its own."""
        tensor = self.empty()
        self.gather(0, tensor.view(self.num_rows, *self.row_shape))
        return tensor

    def gather(self, first: int, rows: Tensor) -> None:
        """Copy the rows of the message from row ``first`` on into ``rows``: ``[count, *row]``, dense."""
        import torch

        rows, views = _as_bits(rows), self._in_bits().bits
        for number, index, begin, end in self._runs(first, rows.shape[0]):
            torch.index_select(views[number], 0, index, out=rows[begin:end])

    def scatter(self, first: int, rows: Tensor) -> None:
        """The inverse of :meth:`gather`: into the views."""
        rows, views = _as_bits(rows), self._in_bits()
        wide = _as_wide(rows)
        for number, index, begin, end in self._runs(first, rows.shape[0]):
            view = views.wide[number]
            if len(self._ids) == 1:  # one piece of memory, as a rule, which an index copies byte by byte
                views.bits[number][self._ids[0]].copy_(rows[begin])
            elif view is None or wide is None:
                views.bits[number].index_copy_(0, index, rows[begin:end])
            else:
                view.index_copy_(0, index, wide[begin:end])

    def _in_bits(self) -> _Copied:
        if self._copied is None:
            bits = [_as_bits(view) for view in self._views]
            self._copied = _Copied(bits, [_as_wide(view) for view in bits])
        return self._copied

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, Any, int, int]]:
        """(which view, which of its rows, and where in ``rows`` they begin and end)."""
        import torch

        if self._index is None:
            index = torch.tensor(self._ids, dtype=torch.int64)
            if self.device.type == "cuda":  # from other memory the host would wait for the stream
                index = index.pin_memory()
            self._index = index.to(self.device, non_blocking=True)
        done = 0
        while done < count:
            number, at = divmod(first + done, len(self._ids))
            step = min(count - done, len(self._ids) - at)
            yield number, self._index[at : at + step], done, done + step
            done += step


def _is_plain(view: Tensor) -> bool:
    """Whether it is a plain strided tensor: no subclass, sparse or nested one."""
    import torch

    return (
        type(view) in (torch.Tensor, torch.nn.Parameter)
        and view.layout is torch.strided
        and not view.is_nested
    )


class _Copied(NamedTuple):
    """The views, as torch copies them fastest."""

    bits: list[Tensor]
    wide: list[Tensor | None]


def _as_bits(tensor: Tensor) -> Tensor:
    """As integers: bits stay bits, and torch indexes few of its float8 and unsigned types."""
    import torch

    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    dtype = of_size.get(tensor.dtype.itemsize)
    return tensor if dtype is None else tensor.view(dtype)


def _as_wide(bits: Tensor) -> Tensor | None:
    """The same rows in elements of 16 bytes, if they are made of such; they are copied as they are.

    index_copy_ goes element by element: with 16 bytes at a time it was measured at 22 to 31 GB/s for rows of
    6 to 256 KiB, with 8 at 9, with 2 at 3.6. (index_select copies whole rows, however they are looked at.)
    """
    import torch

    wide = torch.complex128
    count = wide.itemsize // bits.element_size()
    if not (
        bits.device.type == "cpu"
        and bits.numel()
        and bits[0].is_contiguous()
        and bits[0].numel() % count == bits.stride(0) % count == bits.storage_offset() % count == 0
        and bits.data_ptr() % wide.itemsize == 0
    ):
        return None
    return bits.view(bits.shape[0], -1).view(wide)
