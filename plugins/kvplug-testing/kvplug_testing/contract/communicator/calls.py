"""One call of one rank and its outcome, as plain values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs

from kvplug.transport import DeviceCommunicator, RecvOp, SendOp


@attrs.frozen(kw_only=True)
class CallOutcome:
    """How one call of one rank ended."""

    rank: int
    value: Any = None
    error: str = ""
    """Class name of the error that it raised; empty if it returned."""
    text: str = ""
    """The error's message."""
    took_s: float = 0.0
    first: Any = None
    """The first tensor argument, as it is after the call; for a batch, the tensors received into."""
    same: bool = False
    """Whether it returned that same tensor object."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} raised {self.error}: {self.text}"
            if self.error
            else f"rank {self.rank}: {self.value}"
        )


@attrs.frozen
class Strided:
    """An argument: a tensor that is not contiguous, with the same content."""

    tensor: Any


@attrs.frozen
class OtherDevice:
    """An argument: this tensor on another device than the rank's ("meta", which every torch has)."""

    tensor: Any


def carried(arg: Any) -> Any:
    """An argument in the form in which it is sent to a rank: plain values and tensors."""
    match arg:
        case Strided(tensor):
            return {"strided": tensor}
        case OtherDevice(tensor):
            return {"elsewhere": tensor}
        case SendOp(tensor, dst):
            return {"send": carried(tensor), "peer": dst}
        case RecvOp(tensor, src):
            return {"recv": carried(tensor), "peer": src}
        case list():
            return [carried(each) for each in arg]
    return arg


def perform(
    made: DeviceCommunicator, rank: int, method: str, args: Sequence[Any], given: dict[str, Any]
) -> CallOutcome:
    """Call a method of a rank's communicator, in the rank's thread or process."""
    import torch

    args = [_there(arg, made.device) for arg in args]
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if method == "batch_isend_irecv" and args and isinstance(args[0], list):
        first = [op.tensor for op in args[0] if isinstance(op, RecvOp)]
    began = time.monotonic()
    try:
        found = getattr(made, method)
        value = found(*args, **given) if callable(found) else found
    except Exception as e:
        took = time.monotonic() - began
        return CallOutcome(rank=rank, error=type(e).__name__, text=str(e), took_s=took, first=_here(first))
    took = time.monotonic() - began
    return CallOutcome(
        rank=rank,
        value=_here(value),
        took_s=took,
        first=_here(first),
        same=first is not None and value is first,
    )


def _there(arg: Any, device: str) -> Any:
    """An argument in the form in which the rank passes it to the method."""
    import torch

    match arg:
        case {"strided": tensor}:
            wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype, device=device)
            wide[..., 0] = tensor.to(device)
            return wide[..., 0]
        case {"elsewhere": tensor}:
            return tensor.to("meta")
        case {"send": tensor, "peer": peer}:
            return SendOp(_there(tensor, device), peer)
        case {"recv": tensor, "peer": peer}:
            return RecvOp(_there(tensor, device), peer)
    if isinstance(arg, torch.Tensor):
        return arg.clone().to(device)
    return [_there(each, device) for each in arg] if type(arg) is list else arg


def _here(value: Any) -> Any:
    """A result in the form in which it is sent back: plain values and CPU tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return None if value.is_meta else value.detach().cpu().contiguous()
    if isinstance(value, (list, tuple)):
        return type(value)(_here(each) for each in value)
    return value
