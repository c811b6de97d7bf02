"""The memory of a pipe's messages: the bytes to send, and the memory to receive into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from kvplug.errors import TensorMismatchError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.net.wire.tensors import TensorMeta, as_bits, dense, dtype_name, is_dense, meta_of
from kvplug.transport.pipe.blocks import Blocks
from kvplug.transport.pipe.device import Mark, TensorDevice

if TYPE_CHECKING:
    from torch import Tensor

Span = tuple[int, int]
"""Address and length of contiguous memory, in bytes."""


@attrs.frozen(eq=False)
class Content:
    """A message to be sent."""

    prefix: bytes
    """Announces the message."""
    nbytes: int = 0
    tensors: tuple[Tensor, ...] = ()
    """The bytes of the message, in order: contiguous tensors of equal size. This object keeps them alive."""
    is_copy: bool = False
    """Whether the tensors are a copy. Then the caller may overwrite the original once :attr:`ready` is
    passed."""
    ready: Mark | None = None
    """Passed when the device has written the bytes; ``None`` if they are already written."""

    @classmethod
    def of_tensor(cls, tensor: Tensor | None, device: TensorDevice, copy_bytes: int = 0) -> Content:
        """Return the content of a message. Tensors of up to ``copy_bytes``, and those that are not
        contiguous, are copied.

        Raises:
            UnsupportedError: the tensor's device, layout or dtype is not supported.
            ResourceExhaustedError: there is no memory for the copy.
        """
        if tensor is None:
            return cls(NONE)
        nbytes = meta_of(tensor).nbytes
        prefix = tensor_prefix(tensor.dtype, tensor.shape, nbytes)
        device.check(tensor, "sends")
        if not nbytes:
            return cls(prefix)
        with NamedExhaustion("copying a message to be sent; nothing was queued"):
            flat = dense(device.staged(tensor.detach()))
            is_copy = flat.data_ptr() != tensor.data_ptr()
            if not is_copy and nbytes <= copy_bytes:
                flat, is_copy = as_bits(flat).clone(), True
        return cls(prefix, nbytes, (flat,), is_copy, device.now(tensor.device))

    @classmethod
    def of_blocks(cls, blocks: Blocks, device: TensorDevice, max_runs: int, copy_bytes: int = 0) -> Content:
        """Return the content of a message of blocks. Gather the blocks first if they have up to
        ``copy_bytes`` bytes or more than ``max_runs`` layers, or are not contiguous in each layer. Raises as
        :meth:`of_tensor`.
        """
        import torch

        device.check(blocks, "sends")
        prefix = tensor_prefix(blocks.dtype, torch.Size(blocks.shape), blocks.nbytes)
        if not blocks.nbytes:
            return cls(prefix)
        runs = _runs(blocks, max_runs) if blocks.nbytes > copy_bytes else None
        is_copy = runs is None
        if runs is None:
            with NamedExhaustion("gathering a message to be sent; nothing was queued"):
                runs = [blocks.gathered()]
        return cls(prefix, blocks.nbytes, tuple(runs), is_copy, device.now(blocks.device))


class Target:
    """The memory that a message is received into: new memory, ``out``, or blocks of a cache."""

    def __init__(
        self, device: TensorDevice, max_runs: int, out: Tensor | None = None, blocks: Blocks | None = None
    ) -> None:
        """Without ``out`` and ``blocks``, the message is received into new memory.

        Raises:
            UnsupportedError: the device, dtype or layout of the memory is not supported.
        """
        self._device = device
        self._max_runs = max_runs
        self._out = out
        self._blocks = blocks
        self._wanted: TensorMeta | None = None
        if out is not None:
            self._wanted = meta_of(out)
            device.check(out, "receives into")
        elif blocks is not None:
            self._wanted = TensorMeta(dtype_name(blocks.dtype), blocks.shape)
            device.check(blocks, "receives into")

    @property
    def is_new(self) -> bool:
        """Whether the pipe allocates the memory of the message and returns it."""
        return self._wanted is None

    def check(self, meta: TensorMeta | None) -> None:
        """Check that a message fits into the memory.

        Raises:
            TensorMismatchError: it does not fit; the message stays.
        """
        if self._wanted is not None and meta != self._wanted:
            raise self._wanted.mismatch(meta, "the blocks are" if self._out is None else "out= is")

    def memory(self) -> list[Tensor] | None:
        """Return the caller's memory as contiguous tensors, or ``None`` if the message cannot be moved into
        it directly."""
        if self._blocks is not None:
            return _runs(self._blocks, self._max_runs)
        if self._out is None or not self._device.holds(self._out) or not is_dense(self._out):
            return None
        return [self._out.detach()]

    def value(self, own: Tensor | None) -> Tensor | None:
        """Return the result of the call, once the message is complete.

        ``own`` is the message in the pipe's memory, which is copied in the order of the caller's current
        stream. ``None``: the message is in :meth:`memory` already, or has no bytes.

        Raises:
            TensorMismatchError: ``out`` cannot be written, and the message stays.
        """
        if own is None:
            return self._out
        self._device.hand_over(own)
        if self._blocks is not None:
            rows = as_bits(own).view(self._blocks.dtype)
            self._blocks.scatter(0, rows.view(self._blocks.num_rows, *self._blocks.row_shape))
        elif self._out is None:
            return own
        else:
            try:
                self._device.copy(self._out, own)
            except RuntimeError as e:
                NamedExhaustion.check(e, "copying a message into out=; the message stays")
                raise TensorMismatchError(f"out= cannot be written, and the message stays: {e}") from e
        return self._out


def spans_of(tensors: Iterable[Tensor]) -> list[Span]:
    """Return the address and length of each of these contiguous tensors."""
    return [(each.data_ptr(), each.numel() * each.element_size()) for each in tensors]


def bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor on any device as its bytes."""
    import torch

    return tensor.as_strided((tensor.numel(),), (1,)).view(
        torch.uint8
    )  # its axes of size 1 may have any stride


def cut(spans: Sequence[tuple[int, ...]], start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the span, address, length) for each piece of the ``nbytes`` bytes from ``start`` on.

    Each span begins with its address and length.
    """
    for index, (address, length, *_) in enumerate(spans):
        if start >= length:
            start -= length
            continue
        taken = min(length - start, nbytes)
        if not taken:
            return
        yield index, address + start, taken
        nbytes -= taken
        start = 0


def _runs(blocks: Blocks, max_runs: int) -> list[Tensor] | None:
    return blocks.runs() if blocks.shape[0] <= max_runs else None
