"""Checks, describes and compares the next calls of all ranks, and splits the tokens of experts among ranks.
All functions are pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import attrs
import msgspec

from kvplug.errors import CapacityError, ConfigError, TensorMismatchError, UnsupportedError, WireError
from kvplug.net.peer_text import peer_text
from kvplug.net.wire import decode, from_plain
from kvplug.net.wire.tensors import as_bits, dtype_name

if TYPE_CHECKING:
    from torch import Tensor

PAIRED: Final = "send and recv"
"""The name of a call in which only some ranks take part."""


@attrs.frozen
class Call:
    """A rank's next call."""

    call: str
    """The name of the call."""
    arguments: str = ""
    """The arguments that must be the same at every rank, in words."""
    refused: str | None = None
    """Why that rank refuses to begin the call; ``None`` if it does not refuse."""
    tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of the rank's tokens for experts, which may differ by rank."""

    def encoded(self) -> bytes:
        """Encode the call for the other ranks. Equal calls have equal bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decoded(cls, rank: int, data: object) -> Call:
        """Decode the call that ``rank`` sent. Raises WireError if ``data`` is not a call."""
        what = f"the next call of rank {rank}"
        if not isinstance(data, bytes):
            raise WireError(f"{what} is a {type(data).__name__}, but bytes were expected")
        return from_plain(decode(data), cls, what)

    def __str__(self) -> str:
        rest = f" with {self.arguments}" if self.refused is None else f", refused there: {self.refused}"
        return peer_text(self.call + rest)

    def same_as(self, other: Call) -> bool:
        """Whether both ranks make the same collective."""
        return (self.call, self.arguments, self.refused) == (other.call, other.arguments, other.refused)


def paired(sends: Sequence[str], recvs: Sequence[str]) -> Call:
    """Return the call of a rank that exchanges tensors, described in words, with one other rank."""
    return Call(PAIRED, f"sends {list(sends)}, recvs {list(recvs)}")


def describe(
    tensor: Tensor,
    *,
    rank: int,
    world_size: int,
    dim: int | None = None,
    sizes: Sequence[int] | None = None,
    root: int | None = None,
    vary: bool = False,
) -> str:
    """Return, in words, the arguments of a call that must be the same at every rank.

    ``vary``: the length along ``dim`` may differ by rank, as in ``sizes``.

    Raises:
        TensorMismatchError: the tensor has no dimension ``dim``, or ``sizes`` do not fit the tensor or the
            group.
    """
    shape: list[int | str] = list(tensor.shape)
    rest = ""
    if dim is not None:
        if not -len(shape) <= dim < len(shape):
            raise TensorMismatchError(f"a tensor of shape {shape} has no dimension {dim}")
        rest = f", dim {dim % len(shape)}"
    if sizes is not None and dim is not None:
        if not isinstance(sizes, Sequence):
            raise TensorMismatchError(f"sizes={sizes!r} was given, but {world_size} numbers are needed")
        rest += f", sizes {list(sizes)}"
        if len(sizes) != world_size or any(type(size) is not int or size < 0 for size in sizes):
            raise TensorMismatchError(
                f"sizes {list(sizes)} were given, but {world_size} numbers are needed, one for each rank"
            )
        if vary and shape[dim] != sizes[rank]:
            raise TensorMismatchError(
                f"dimension {dim} has {shape[dim]} elements at rank {rank}, but should have {sizes[rank]}"
                f" according to sizes {list(sizes)}"
            )
        if vary:
            shape[dim] = "as sizes say"
    if root is not None:
        rest += f", root {root}"
    return f"dtype {dtype_name(tensor.dtype)}, shape {shape}{rest}"


def check_fillable(tensor: Tensor) -> None:
    """Check that a tensor can be written.

    Raises:
        UnsupportedError: its elements share memory, or torch forbids writing it here.
    """
    import torch

    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "a tensor that was made under torch.inference_mode() is filled only under it; pass its clone()"
        )
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UnsupportedError(
            f"a tensor of shape {list(tensor.shape)} cannot be filled: some of its elements share memory,"
            " as after expand(); pass its clone()"
        )


def check_same(name: str, calls: Sequence[Call]) -> None:
    """Compare the calls of all ranks, in the order of ranks.

    Raises:
        TensorMismatchError: the ranks' next calls differ, or a rank refuses its call.
    """
    first = calls[0]
    if first.refused is None and all(call.same_as(first) for call in calls):
        return
    lines = "".join(f"\n  rank {rank}: {call}" for rank, call in enumerate(calls))
    raise TensorMismatchError(f"{name}: every rank must make the same call; nothing was done:{lines}")


def check_paired(
    rank: int, calls: Mapping[int, Call], wanted: Mapping[int, Call], found: Mapping[int, Call]
) -> None:
    """Check that each of two ranks receives what the other sends, in the same order.

    All are keyed by the other rank: ``calls`` are this rank's, ``wanted`` fit them, ``found`` were received.

    Raises:
        TensorMismatchError: what one rank sends is not what the other receives.
    """
    for peer, call in calls.items():
        if found[peer] != wanted[peer]:
            raise TensorMismatchError(
                f"{PAIRED}: one rank must receive what the other sends, and nothing was done:"
                f"\n  rank {rank}: {call}\n  rank {peer}: {found[peer]}"
            )


# -- tensors ---------------------------------------------------------------------------------------


def row_bytes(tensor: Tensor) -> int:
    """Return the bytes of one row along the first dimension."""
    elements: int = math.prod(tensor.shape[1:])
    return elements * int(tensor.element_size())


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor without autograd or lazy flags, if possible in the same memory."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def write_back(tensor: Tensor, work: Tensor) -> None:
    """Copy ``work``, which is ``plain(tensor)``, back into ``tensor`` if it is a copy."""
    if work.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(work)


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised tensor of the dtype and device of ``like``.

    Raises:
        CapacityError: there is no memory for it.
    """
    try:
        return like.new_empty(tuple(shape))
    except (RuntimeError, OverflowError) as e:
        raise CapacityError(f"no memory on {like.device} for a tensor of shape {list(shape)}: {e}") from e


def in_one(like: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
    """Allocate tensors of these shapes in one piece of memory. Return that memory, flat, and the tensors.

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
    """Concatenate parts as integers of the same size, since torch cannot concatenate every dtype."""
    import torch

    return torch.cat([as_bits(part) for part in parts], dim).view(parts[0].dtype)


@attrs.frozen
class TokenSplit:
    """Which rows belong to which rank in a tensor with the tokens of all ranks, in the order of ranks."""

    sizes: tuple[int, ...]
    """How many tokens each rank contributed; 0 if another rank contributed the same tokens."""
    owners: tuple[int, ...]
    """For each rank, the rank that contributed its tokens: itself, unless ranks share tokens."""

    @classmethod
    def of(cls, counts: Sequence[int], width: int) -> TokenSplit:
        """Return the split if each rank r has ``counts[r]`` tokens, and each group of ``width`` consecutive
        ranks shares its tokens.

        Raises:
            TensorMismatchError: ranks that share their tokens have different numbers of tokens.
        """
        owners = tuple(rank - rank % width for rank in range(len(counts)))
        for rank, owner in enumerate(owners):
            if counts[rank] != counts[owner]:
                raise TensorMismatchError(
                    f"rank {owner} has {counts[owner]} tokens and rank {rank} has {counts[rank]}, but without"
                    f" is_sequence_parallel each group of {width} ranks must have the same tokens"
                )
        return cls(tuple(counts[r] if owners[r] == r else 0 for r in range(len(counts))), owners)

    @property
    def total(self) -> int:
        """The number of tokens of all ranks, which is the number of rows of the tensor."""
        return sum(self.sizes)

    @property
    def shared(self) -> bool:
        """Whether some ranks have the same tokens."""
        return self.owners != tuple(range(len(self.owners)))

    def rows(self, rank: int) -> slice:
        """Return the rows of ``rank``'s tokens."""
        owner = self.owners[rank]
        start = sum(self.sizes[:owner])
        return slice(start, start + self.sizes[owner])


def width_of(world_size: int, data_parallel_size: int) -> int:
    """Return how many ranks share their tokens: the ranks of one data-parallel rank.

    Raises:
        ConfigError: the ranks cannot be divided evenly.
    """
    if world_size > 1 and world_size % data_parallel_size:
        raise ConfigError(
            f"a group of {world_size} ranks cannot be divided evenly by"
            f" data_parallel_size={data_parallel_size}"
        )
    return max(1, world_size // data_parallel_size)
