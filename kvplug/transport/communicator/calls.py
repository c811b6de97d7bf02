"""A rank's next call as plain values: checked, described and compared. All functions are pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import CapacityError, TensorMismatchError, UnsupportedError, WireError
from kvplug.net.peer_text import peer_text

if TYPE_CHECKING:
    from torch import Tensor


def dtype_name(dtype: Any) -> str:
    """``torch.bfloat16`` and ``"bfloat16"`` are ``"bfloat16"``."""
    return str(dtype).rpartition(".")[2]


def describe(
    tensor: Tensor,
    *,
    rank: int,
    world_size: int,
    dim: int | None = None,
    sizes: Sequence[int] | None = None,
    root: int | None = None,
    vary: bool = False,
) -> dict[str, Any]:
    """The part of a call that must be the same at every rank.

    ``vary``: the length along ``dim`` may differ by rank, as ``sizes`` say.

    Raises:
        TensorMismatchError: ``dim`` is not there, or ``sizes`` do not fit the tensor or the group.
    """
    shape: list[Any] = list(tensor.shape)
    said: dict[str, Any] = {"dtype": dtype_name(tensor.dtype), "shape": shape}
    if dim is not None:
        if not -len(shape) <= dim < len(shape):
            raise TensorMismatchError(f"dimension {dim} of a tensor of shape {shape} is not there")
        said["dim"] = dim % len(shape)
    if sizes is not None and dim is not None:
        if not isinstance(sizes, Sequence):
            raise TensorMismatchError(f"sizes={sizes!r} was given, and {world_size} numbers are wanted")
        said["sizes"] = list(sizes)
        if len(sizes) != world_size or any(type(size) is not int or size < 0 for size in sizes):
            raise TensorMismatchError(
                f"sizes {list(sizes)} were given, and {world_size} numbers, one for each rank, are wanted"
            )
        if vary and shape[dim] != sizes[rank]:
            raise TensorMismatchError(
                f"dimension {dim} has {shape[dim]} elements at rank {rank}, and sizes {list(sizes)} say"
                f" {sizes[rank]}"
            )
        if vary:
            shape[dim] = "as sizes say"
    if root is not None:
        said["root"] = root
    return said


def check_dim(dim: object) -> None:
    """Raises TensorMismatchError: it is no number."""
    if type(dim) is not int:
        raise TensorMismatchError(f"dim={dim!r} was given, and the number of a dimension is wanted")


def check_fillable(tensor: Tensor) -> None:
    """Raises UnsupportedError: elements of it share their memory."""
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UnsupportedError(
            f"a tensor of shape {list(tensor.shape)} is to be filled, of which elements share their memory,"
            " as after expand(); give its clone()"
        )


def check_divisible(length: int, dim: int, world_size: int) -> None:
    """Raises TensorMismatchError."""
    if length % world_size:
        raise TensorMismatchError(
            f"dimension {dim} has {length} elements, and {world_size} ranks cannot have equal parts of them"
        )


def check_sum(length: int, dim: int, sizes: Sequence[int]) -> None:
    """Raises TensorMismatchError."""
    if sum(sizes) != length:
        raise TensorMismatchError(
            f"sizes {list(sizes)} add up to {sum(sizes)}, and dimension {dim} has {length} elements"
        )


def check_same(name: str, calls: Sequence[Mapping[str, Any]], ranks: Sequence[int] | None = None) -> None:
    """Compare the calls of all ranks. Pure.

    Raises:
        TensorMismatchError: the ranks' next calls differ.
    """
    if all(call == calls[0] for call in calls) and "refused" not in calls[0]:
        return
    numbered = list(zip(ranks or range(len(calls)), calls, strict=True))
    lines = "".join(f"\n  rank {rank}: {_in_words(call)}" for rank, call in numbered)
    raise TensorMismatchError(
        f"{name}: every rank must be about to do the same, and nothing was done:{lines}"
    )


def _in_words(call: Mapping[str, Any]) -> str:
    name = call["call"]
    if "refused" in call:
        return peer_text(f"{name}, refused there: {call['refused']}")
    rest = ", ".join(f"{key} {value}" for key, value in call.items() if key != "call")
    return peer_text(f"{name} with {rest}")


def check_received(rank: int, call: object) -> Mapping[str, Any]:
    """The call that another rank sent, which may be anything. Pure.

    Raises:
        WireError: it is no call: not a mapping of plain values with a name.
    """
    if isinstance(call, dict) and type(call.get("call")) is str and _is_plain(call):
        return call
    raise WireError(f"rank {rank} sent something else than its next call; same kvplug?")


def tokens_of(rank: int, call: Mapping[str, Any]) -> int:
    """How many tokens a rank has announced; 0 if it was refused there. Pure.

    Raises:
        WireError: no number.
    """
    tokens: int = call.get("tokens", 0)
    if type(tokens) is not int or tokens < 0:
        raise WireError(f"rank {rank} sent {peer_text(str(tokens))} as its number of tokens")
    return tokens


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row along the first dimension."""
    elements: int = math.prod(tensor.shape[1:])
    return elements * int(tensor.element_size())


def _is_plain(value: object) -> bool:
    """Whether it can be compared and printed: a tensor, for example, has no single truth value."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return True
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    return kind in (list, tuple) and all(map(_is_plain, value))  # type: ignore[call-overload]


PAIRED: Final = "send and recv"


def in_short(said: Mapping[str, Any]) -> str:
    """The bytes of a tensor that :func:`describe` has described."""
    return f"{said['dtype']} {said['shape']}"


def paired(sends: Sequence[str], recvs: Sequence[str]) -> dict[str, Any]:
    """One rank's next operations with one other rank."""
    return {"call": PAIRED, "sends": list(sends), "recvs": list(recvs)}


def is_paired(call: Mapping[str, Any]) -> bool:
    """Whether this is a call between some ranks, not a collective of all."""
    return call.get("call") == PAIRED


def check_paired(
    rank: int, calls: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]]
) -> None:
    """Check that each of two ranks receives what the other sends, in the same order. Pure.

    Raises:
        TensorMismatchError: it is not, with some rank.
    """
    for peer, call in calls.items():
        their = theirs[peer]
        fits = (call["sends"], call["recvs"]) == (their.get("recvs"), their.get("sends"))
        if "refused" in their or not fits or not is_paired(their):
            raise TensorMismatchError(
                f"{PAIRED}: one rank must receive what the other sends, and nothing was done:"
                f"\n  rank {rank}: {_in_words(call)}\n  rank {peer}: {_in_words(their)}"
            )


def plain(tensor: Tensor) -> Tensor:
    """A contiguous tensor without autograd or lazy flags: the same memory where the tensor already is one."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def write_back(tensor: Tensor, work: Tensor) -> None:
    """Copy the result in ``plain(tensor)`` back, if that was a copy."""
    if work.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(work)


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Of its dtype and device. Raises CapacityError: there is no memory for it."""
    try:
        return like.new_empty(tuple(shape))
    except (RuntimeError, OverflowError) as e:
        raise CapacityError(f"no memory on {like.device} for a tensor of shape {list(shape)}: {e}") from e


def in_one(like: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
    """New memory for tensors of these shapes, one behind the other: the whole of it, flat, and each.

    Raises as :func:`empty`.
    """
    counts = [math.prod(shape) for shape in shapes]
    whole = empty(like, [sum(counts)])
    parts = whole.split(counts)
    return whole, [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def is_outermost(shape: Sequence[int], dim: int) -> bool:
    """Whether the parts of a contiguous tensor, cut along ``dim``, are contiguous and adjacent."""
    return math.prod(shape[:dim]) == 1


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate as integers of the same size, since torch cannot concatenate every dtype."""
    import torch

    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = by_size.get(parts[0].element_size())
    if bits is None:
        return torch.cat(list(parts), dim)
    return torch.cat([part.view(bits) for part in parts], dim).view(parts[0].dtype)
