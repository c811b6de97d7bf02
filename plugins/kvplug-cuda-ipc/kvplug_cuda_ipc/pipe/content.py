"""The memory that a pipe copies from and to, piece by piece: what is sent, and what is received into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug import UnsupportedError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.net.wire.tensors import as_bits, dense, dtype_name, is_dense, meta_of
from kvplug.transport import Blocks, NamedExhaustion, TensorMismatchError
from kvplug_cuda_ipc.cudart.library import Event
from kvplug_cuda_ipc.device import Device

if TYPE_CHECKING:
    from torch import Tensor


class Runs:
    """The bytes of a message, in contiguous runs of equal length."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Of contiguous tensors of one size, which it keeps alive."""
        self._tensors = tuple(tensors)
        self._addresses = [each.data_ptr() for each in tensors]
        self._run_bytes = tensors[0].numel() * tensors[0].element_size()

    def parts(self, done: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """(address, length) of the ``nbytes`` bytes after the first ``done``."""
        while nbytes:
            number, skip = divmod(done, self._run_bytes)
            length = min(nbytes, self._run_bytes - skip)
            yield self._addresses[number] + skip, length
            done += length
            nbytes -= length


@attrs.frozen(eq=False)
class Content:
    """A message ready to be sent."""

    prefix: bytes
    """What announces the message."""
    nbytes: int = 0
    runs: Runs | None = None
    """``None``: it has no bytes."""
    ready: Event | None = None
    """When the device has computed them."""


def content_of(tensor: Tensor | None, device: Device) -> Content:
    """The content of a message; a tensor that is not contiguous is copied.

    Raises:
        UnsupportedError: a device, layout or dtype that is not carried.
        ResourceExhaustedError: there is no memory for the copy.
    """
    if tensor is None:
        return Content(NONE)
    meta = meta_of(tensor)
    prefix = tensor_prefix(tensor.dtype, tensor.shape, meta.nbytes)
    _check_device(tensor, device, "sends")
    if not meta.nbytes:
        return Content(prefix)
    return Content(prefix, meta.nbytes, Runs([_allocating(dense, tensor.detach())]), _now(device))


def content_of_blocks(blocks: Blocks, device: Device) -> Content:
    """The content of a message of blocks, which are gathered first unless they are consecutive.

    Raises:
        UnsupportedError: a device or dtype that is not carried.
        ResourceExhaustedError: there is no memory to gather them in.
    """
    import torch

    _check_device(blocks, device, "sends")
    prefix = tensor_prefix(blocks.dtype, torch.Size(blocks.shape), blocks.nbytes)
    if not blocks.nbytes:
        return Content(prefix)
    runs = blocks.runs() or [_allocating(Blocks.gathered, blocks)]
    return Content(prefix, blocks.nbytes, Runs(runs), _now(device))


class Target:
    """What a message is received into: new memory, ``out``, or ``blocks`` of a cache."""

    def __init__(self, device: Device, out: Tensor | None = None, blocks: Blocks | None = None) -> None:
        """Raises UnsupportedError: it is on another device, or of a dtype or layout that is not carried."""
        self._device = device
        self._out = out
        self._blocks = blocks
        self._wanted: TensorMeta | None = None
        if out is not None:
            self._wanted = meta_of(out)
            _check_device(out, device, "receives into")
        elif blocks is not None:
            self._wanted = TensorMeta(dtype_name(blocks.dtype), blocks.shape)
            _check_device(blocks, device, "receives into")

    def check(self, meta: TensorMeta | None) -> None:
        """Raises TensorMismatchError: that message does not fit, and stays."""
        wanted = self._wanted
        if wanted is not None and meta != wanted:
            raise wanted.mismatch(meta, "the blocks are" if self._out is None else "out= is")

    def runs(self) -> Runs | None:
        """Where the message's bytes can be copied as they come; ``None``: there is no contiguous memory."""
        if self._blocks is not None:
            found = self._blocks.runs()
            return None if found is None else Runs(found)
        return Runs([self._out.detach()]) if self._out is not None and is_dense(self._out) else None

    def ready(self) -> Event | None:
        """When the caller's stream has done its earlier work, so that the memory may be written."""
        return _now(self._device)

    def value(self, own: Tensor | None) -> Tensor | None:
        """What the call returns, once the message is complete.

        Args:
            own: The message, in memory of the pipe's; ``None``: it was copied to :meth:`runs`.

        Raises:
            TensorMismatchError: ``out`` cannot be written, and the message stays.
        """
        if own is None:
            return self._out
        self._device.hand_over(own)
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


def _check_device(given: Tensor | Blocks, device: Device, verb: str) -> None:
    if str(given.device) == device.name:
        return
    kind = "blocks of tensors" if isinstance(given, Blocks) else "tensors"
    where = "this is a CPU one" if given.device.type == "cpu" else f"this one is on {given.device}"
    advice = "; move it there, or use a pipe for CPU tensors" if given.device.type == "cpu" else ""
    raise UnsupportedError(f"this pipe 'cuda-ipc' {verb} {kind} on {device.name}, and {where}{advice}")


def _now(device: Device) -> Event:
    return device.runtime.event(device.callers_stream())


@NamedExhaustion("copying what is to be sent; nothing was queued")
def _allocating(make: Any, given: Any) -> Any:
    """``make(given)``. Raises ResourceExhaustedError: there is no memory for it."""
    return make(given)
