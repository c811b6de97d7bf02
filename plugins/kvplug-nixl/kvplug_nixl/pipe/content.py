"""The memory that a pipe reads from and into: what is sent, and what is received into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from kvplug import UnsupportedError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.net.wire.tensors import (
    as_bits,
    dense,
    dtype_name,
    empty_like_meta,
    is_dense,
    memory_of,
    memory_of_writable,
    meta_of,
)
from kvplug.transport import Blocks, NamedExhaustion, TensorMismatchError
from kvplug_nixl.agent import HOST, Span
from kvplug_nixl.pipe.frames import MAX_SPANS

if TYPE_CHECKING:
    from torch import Tensor

DEVICES: Final = ("cpu", "cuda")
"""Types of devices whose tensors are carried."""


@attrs.frozen(eq=False)
class Content:
    """A message ready to be sent."""

    prefix: bytes
    """What announces the message."""
    nbytes: int = 0
    tensors: tuple[Tensor, ...] = ()
    """Contiguous; together its bytes."""

    def data(self) -> bytes:
        """A copy of its bytes, on the host."""
        return b"".join(bytes(memory_of(each.cpu())) for each in self.tensors)


def content_of(tensor: Tensor | None) -> Content:
    """The content of a message; a tensor that is not contiguous is copied.

    Raises:
        UnsupportedError: a device, layout or dtype that is not carried.
        ResourceExhaustedError: there is no memory for the copy.
    """
    if tensor is None:
        return Content(NONE)
    meta = meta_of(tensor)
    prefix = tensor_prefix(tensor.dtype, tensor.shape, meta.nbytes)
    _check_device(tensor, "sends")
    if not meta.nbytes:
        return Content(prefix)
    with NamedExhaustion("copying what is to be sent; nothing was queued"):
        return Content(prefix, meta.nbytes, (dense(tensor.detach()),))


def content_of_blocks(blocks: Blocks) -> Content:
    """The content of a message of blocks, which are gathered first unless they are consecutive.

    Raises:
        UnsupportedError: a device or dtype that is not carried.
        ResourceExhaustedError: there is no memory to gather them in.
    """
    import torch

    _check_device(blocks, "sends")
    prefix = tensor_prefix(blocks.dtype, torch.Size(blocks.shape), blocks.nbytes)
    if not blocks.nbytes:
        return Content(prefix)
    runs = blocks.runs()
    if runs is None or len(runs) > MAX_SPANS:
        with NamedExhaustion("gathering what is to be sent; nothing was queued"):
            runs = [blocks.gathered()]
    return Content(prefix, blocks.nbytes, tuple(runs))


class Target:
    """What a message is received into: new memory, ``out``, or ``blocks`` of a cache."""

    def __init__(self, out: Tensor | None = None, blocks: Blocks | None = None) -> None:
        """Raises UnsupportedError: it is of a device, dtype or layout that is not carried."""
        self._out = out
        self._blocks = blocks
        self._wanted: TensorMeta | None = None
        if out is not None:
            self._wanted = meta_of(out)
            _check_device(out, "receives into")
        elif blocks is not None:
            self._wanted = TensorMeta(dtype_name(blocks.dtype), blocks.shape)
            _check_device(blocks, "receives into")

    def check(self, meta: TensorMeta | None) -> None:
        """Raises TensorMismatchError: that message does not fit, and stays."""
        wanted = self._wanted
        if wanted is not None and meta != wanted:
            raise wanted.mismatch(meta, "the blocks are" if self._out is None else "out= is")

    @property
    def is_new(self) -> bool:
        """Whether the pipe takes memory for the message, and returns it."""
        return self._out is None and self._blocks is None

    def memory(self) -> list[Tensor] | None:
        """Contiguous memory of the caller's for the whole message; ``None``: there is none."""
        if self._blocks is not None:
            runs = self._blocks.runs()
            return None if runs is None or len(runs) > MAX_SPANS else runs
        return [self._out.detach()] if self._out is not None and is_dense(self._out) else None

    def value(self, own: Tensor | None) -> Tensor | None:
        """What the call returns, once the message is complete.

        Args:
            own: the message, in memory of the pipe's; ``None``: it lies in :meth:`memory` already.

        Raises:
            TensorMismatchError: ``out`` cannot be written, and the message stays.
        """
        if own is None:
            return self._out
        if self._blocks is not None:
            rows = as_bits(own).view(self._blocks.dtype)
            self._blocks.scatter(0, rows.view(self._blocks.num_rows, *self._blocks.row_shape))
            return None
        out = self._out
        if out is None:
            return own
        try:
            if out.is_conj() or out.is_neg():
                out.detach().copy_(own)  # the caller sees it through its flag
            else:
                as_bits(out.detach()).copy_(as_bits(own))
        except RuntimeError as e:
            NamedExhaustion.check(e, "copying a message into out=; it stays")
            raise TensorMismatchError(f"out= cannot be written, and the message stays: {e}") from e
        return out


def new_tensor(meta: TensorMeta, device: str) -> Tensor:
    """Memory for a message, of any content.

    Raises:
        ResourceExhaustedError: there is not that much.
    """
    import torch

    if device == "cpu":
        return empty_like_meta(meta)
    with torch.device(device):
        return empty_like_meta(meta)


def from_bytes(meta: TensorMeta, data: bytes, device: str) -> Tensor:
    """A tensor with these bytes."""
    tensor = empty_like_meta(meta)
    if data:
        memory_of_writable(tensor)[:] = data
    return tensor if device == "cpu" else tensor.to(device)


def gpu_of(tensor: Tensor) -> int:
    """The index of the GPU that its memory is on; :data:`HOST`: on none."""
    device = tensor.untyped_storage().device
    return HOST if device.type == "cpu" else int(device.index)


def put(memory: Sequence[Tensor], start: int, piece: Tensor) -> None:
    """Copy bytes from the host into contiguous tensors, after their first ``start`` bytes."""
    import torch

    for each in memory:
        nbytes = each.numel() * each.element_size()
        if start >= nbytes:
            start -= nbytes
            continue
        count = min(nbytes - start, len(piece))
        if not count:
            return
        if each.is_cpu:
            memory_of_writable(each)[start : start + count] = memory_of(piece)[:count]
        else:
            as_bits(each).reshape(-1).view(torch.uint8)[start : start + count].copy_(piece[:count])
        piece, start = piece[count:], 0


def cut(spans: Sequence[Span], start: int, nbytes: int) -> list[Span]:
    """The spans of the ``nbytes`` bytes after the first ``start``."""
    found: list[Span] = []
    for address, length, number in spans:
        if start >= length:
            start -= length
            continue
        taken = min(length - start, nbytes)
        if not taken:
            break
        found.append((address + start, taken, number))
        nbytes -= taken
        start = 0
    return found


def matched(one: Sequence[Span], other: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Both, of equal total length, cut wherever one of them is: pairs of equal length."""
    theirs = iter(other)
    address, left, number = next(theirs, (0, 0, 0))
    for mine, length, my_number in one:
        while length:
            step = min(length, left)
            yield (mine, step, my_number), (address, step, number)
            mine, length = mine + step, length - step
            address, left = address + step, left - step
            if not left:
                address, left, number = next(theirs, (0, 0, 0))


def _check_device(given: Tensor | Blocks, verb: str) -> None:
    if given.device.type in DEVICES:
        return
    kind = "blocks of tensors" if isinstance(given, Blocks) else "tensors"
    raise UnsupportedError(f"the pipe 'nixl' {verb} CPU and CUDA {kind}, and this is on {given.device}")
