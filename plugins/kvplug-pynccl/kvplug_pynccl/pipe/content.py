"""Memory as NCCL takes it: pieces of equal size, each contiguous; and what fits an announcement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug import TransportError, UnsupportedError
from kvplug.net.wire import TensorMeta, copy_into, memory_of
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.net.wire.tensors import as_bits, dense, dtype_name, is_dense, meta_of
from kvplug.transport import Blocks, Deadline, NamedExhaustion, TensorMismatchError
from kvplug_pynccl.device import Device, Event
from kvplug_pynccl.pipe.frames import MAX_PIECES

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@attrs.frozen(eq=False)
class Memory:
    """Where a message lies. The tensors keep it alive."""

    tensors: tuple[Tensor, ...]
    addresses: tuple[int, ...]
    piece_bytes: int

    @classmethod
    def of(cls, tensor: Tensor, pieces: int) -> Memory:
        """A contiguous tensor, cut into so many pieces."""
        piece_bytes = tensor.numel() * tensor.element_size() // pieces
        begin = tensor.data_ptr()
        return cls((tensor,), tuple(begin + k * piece_bytes for k in range(pieces)), piece_bytes)

    @classmethod
    def of_runs(cls, runs: Sequence[Tensor]) -> Memory:
        """Contiguous tensors of one size, a piece each."""
        piece_bytes = runs[0].numel() * runs[0].element_size()
        return cls(tuple(runs), tuple(run.data_ptr() for run in runs), piece_bytes)


@attrs.frozen(eq=False)
class Content:
    """A message ready to be sent."""

    prefix: bytes
    nbytes: int
    memory: Memory | None
    """``None``: it has no bytes."""
    ready: Event | None
    """When the device has written it; ``None``: it has."""
    owned: bool
    """It is a copy: the caller may overwrite the tensor once the copy is written."""
    kept: Any = None
    """What the device still reads to write the copy."""

    def is_ready(self) -> bool:
        """Whether the device has written it. Never waits."""
        return self.ready is None or self.ready.is_done()


def content_of(tensor: Tensor | None, device: Device, *, stage: bool, copy_bytes: int) -> Content:
    """Of a tensor or ``None``; a copy where it is small, or does not lie in memory as it reads.

    Raises:
        UnsupportedError: a device, layout or dtype that this pipe does not carry.
        ResourceExhaustedError: there is no memory for the copy.
    """
    if tensor is None:
        return Content(NONE, 0, None, None, True)
    meta = meta_of(tensor)
    prefix = tensor_prefix(tensor.dtype, tensor.shape, meta.nbytes)
    if not device.owns(tensor):
        _check_stageable(tensor, device, stage, "sends")
    if not meta.nbytes:
        return Content(prefix, 0, None, None, True)
    kept = None
    with _copying(device, meta.nbytes):
        plain = as_bits(dense(tensor.detach()))
        owned = plain.data_ptr() != tensor.data_ptr()
        if not device.owns(tensor):
            plain, kept = device.upload(plain)
            owned = True
        if not owned and meta.nbytes <= copy_bytes:
            plain, owned = plain.clone(), True
    return Content(prefix, meta.nbytes, Memory.of(plain, 1), device.now(), owned, kept)


def content_of_blocks(blocks: Blocks, device: Device, *, copy_bytes: int) -> Content:
    """Of blocks: one piece for each view, from where they are if they are large and lie one after the other.

    Raises:
        UnsupportedError: a device or dtype that this pipe does not carry.
        ResourceExhaustedError: there is no memory for the copy.
    """
    _check_device(blocks, device)
    shape = blocks.shape
    prefix = tensor_prefix(blocks.dtype, _size(shape), blocks.nbytes)
    if not blocks.nbytes:
        return Content(prefix, 0, None, None, True)
    found = runs(blocks) if blocks.nbytes > copy_bytes else None
    if found is not None:
        return Content(prefix, blocks.nbytes, Memory.of_runs(found), device.now(), False)
    with _copying(device, blocks.nbytes):
        gathered = as_bits(blocks.gathered())
    return Content(prefix, blocks.nbytes, Memory.of(gathered, pieces_of(shape)), device.now(), True)


def runs(blocks: Blocks) -> list[Tensor] | None:
    """The blocks of each view, where they follow one another in its memory."""
    return blocks.runs() if pieces_of(blocks.shape) == blocks.shape[0] else None


def pieces_of(shape: Sequence[int]) -> int:
    """Of a message of blocks: as many as there are views, if that is not too many."""
    return shape[0] if 0 < shape[0] <= MAX_PIECES else 1


def check_out(out: Tensor, meta: TensorMeta | None, device: Device, *, stage: bool) -> None:
    """Whether a message can be received into ``out``.

    Raises:
        TensorMismatchError: not this message, which stays.
        UnsupportedError: it is not a dense tensor of the pipe's device.
    """
    wanted = meta_of(out)
    if not device.owns(out):
        _check_stageable(out, device, stage, "receives into")
    if wanted != meta:
        raise wanted.mismatch(meta, "out= is")


def check_blocks(blocks: Blocks, meta: TensorMeta | None, device: Device) -> None:
    """Whether a message can be received into blocks. Raises as :func:`check_out`."""
    _check_device(blocks, device)
    wanted = TensorMeta(dtype_name(blocks.dtype), blocks.shape)
    if wanted != meta:
        raise wanted.mismatch(meta, "the blocks are")


def is_plain(out: Tensor, device: Device) -> bool:
    """Whether a message can be received into it without a copy."""
    return device.owns(out) and is_dense(out)


def fill(out: Tensor, message: Tensor, device: Device, deadline: Deadline) -> None:
    """Copy a message into memory that it could not be received into.

    Raises:
        TensorMismatchError: ``out`` cannot be written; the message stays.
        TimeoutError: the copy did not end in time; the message stays.
    """
    try:
        if not device.owns(out):
            staged = device.download(as_bits(message))
            device.finish(deadline)
            copy_into(out, memory_of(staged))
            return
        out = out.detach()
        if out.is_conj() or out.is_neg():
            out.copy_(message)
        else:
            as_bits(out).copy_(as_bits(message))
        device.finish(deadline)
    except RuntimeError as e:
        NamedExhaustion.check(e, "copying a message into out=; it stays")
        raise TensorMismatchError(f"out= cannot be written, and the message stays: {e}") from e


def _copying(device: Device, nbytes: int) -> NamedExhaustion:
    what = f"a copy of {nbytes} bytes on {device.name}; nothing was queued"
    return NamedExhaustion(what, TransportError, (RuntimeError, MemoryError))


def _check_device(blocks: Blocks, device: Device) -> None:
    if str(blocks.device) != device.name:
        raise UnsupportedError(
            f"the pipe 'pynccl' moves blocks of tensors on {device.name}, not on {blocks.device}"
        )


def _check_stageable(tensor: Tensor, device: Device, stage: bool, verb: str) -> None:
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"this pipe 'pynccl' {verb} tensors on {device.name}, not on {tensor.device}")
    if not stage:
        raise UnsupportedError(
            f"this pipe 'pynccl' {verb} tensors on {device.name}, and this is a CPU tensor: move it there,"
            " set stage_cpu_tensors to have it staged through pinned memory, or use a pipe for CPU tensors"
        )


def _size(shape: Sequence[int]) -> torch.Size:
    import torch

    return torch.Size(shape)
