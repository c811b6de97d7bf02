"""Messages between the ranks of a group to make a queue, over a kvplug group or a torch process group."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import msgspec

from kvplug.errors import KvplugError, TransportError, UnsupportedError, WireError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.net.exhaustion import raise_if_exhausted

_MAX_BYTES: Final = 1 << 20
"""Of one value, looked at before anything is allocated. A handle has some hundred bytes."""

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@runtime_checkable
class Rendezvous(Protocol):
    """Ranks that exchange small plain values: the part of a kvplug group that a queue needs."""

    rank: int
    world_size: int

    def broadcast(self, value: object, src: int, timeout: Timeout = DEFAULT_TIMEOUT) -> Any: ...
    def all_gather(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> list[Any]: ...


def rendezvous_of(group: object) -> Rendezvous:
    """The rendezvous of the ranks of ``group``.

    Raises:
        UnsupportedError: it is neither a kvplug group nor a torch process group with CPU tensors.
    """
    torch_group = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)
    if torch_group is not None and isinstance(group, torch_group):
        return TorchRendezvous(group)
    if isinstance(group, Rendezvous):
        return group
    raise UnsupportedError(
        "a kvplug.StatelessGroup or a torch.distributed.ProcessGroup is needed,"
        f" not a {type(group).__qualname__}"
    )


class TorchRendezvous:
    """The ranks of a torch process group. Values travel as bytes in CPU tensors, their length first.

    Values of msgpack's types are carried. The group decides how long a collective waits, not ``timeout``.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Use the collectives of ``group``.

        Raises:
            UnsupportedError: it has no CPU tensors, or this process has no part in it.
        """
        import torch.distributed as dist

        try:
            backends = str(dist.get_backend_config(group))
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        except (RuntimeError, TypeError, ValueError) as e:
            raise UnsupportedError(f"torch.distributed does not know this process group: {e}") from e
        if self.rank < 0:
            raise UnsupportedError("this process is not in the process group")
        if not any(backend.startswith("cpu:") for backend in backends.split(",")):
            raise UnsupportedError(
                f"the process group ({backends}) has no CPU tensors, in which a handle travels: give a CPU"
                ' group, as torch.distributed.new_group(backend="gloo") makes it'
            )
        self._group = group

    def broadcast(self, value: object, src: int, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        """The value that rank ``src`` of the group gave; what the others give is ignored.

        Raises:
            UnsupportedError: the value is not carried. Nothing was sent.
            TransportError: the collective failed; says torch's reason.
            WireError: what came is no value.
        """
        import torch.distributed as dist

        data = _packed(value) if self.rank == src else b""
        with _collective():
            root = dist.get_global_rank(self._group, src)
            length = _tensor(len(data).to_bytes(8, "little"))
            dist.broadcast(length, root, self._group)
            tensor = _tensor(data.ljust(_bounded(_bytes(length)), b"\0"))
            dist.broadcast(tensor, root, self._group)
        return value if self.rank == src else _unpacked(_bytes(tensor))

    def all_gather(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> list[Any]:
        """The values of all ranks, in the order of ranks. Raises as :meth:`broadcast`."""
        data = _packed(value)
        with _collective():
            lengths = [_bounded(each) for each in self._gathered(len(data).to_bytes(8, "little"))]
            padded = self._gathered(data.ljust(max(lengths), b"\0"))
        return [_unpacked(each[:length]) for each, length in zip(padded, lengths, strict=True)]

    def _gathered(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, which have equal lengths."""
        import torch.distributed as dist

        tensors = [_tensor(bytes(len(data))) for _ in range(self.world_size)]
        dist.all_gather(tensors, _tensor(data), self._group)
        return [_bytes(tensor) for tensor in tensors]


@contextlib.contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except KvplugError:
        raise
    except (RuntimeError, ValueError, MemoryError) as e:  # torch has none for a peer that is gone or late
        raise_if_exhausted(e, "a collective of the process group")
        raise TransportError(f"a collective of the process group failed: {e}") from e


def _tensor(data: Sequence[int]) -> Tensor:
    import torch

    return torch.tensor(list(data), dtype=torch.uint8, device="cpu")


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())


def _bounded(told: bytes) -> int:
    length = int.from_bytes(told, "little")
    if length > _MAX_BYTES:
        raise WireError(f"a value of {length} bytes was announced, and {_MAX_BYTES} are the most")
    return length


def _packed(value: object) -> bytes:
    try:
        data = msgspec.msgpack.encode(value)
        as_it_was = msgspec.msgpack.decode(data) == value
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as e:
        raise UnsupportedError(f"this does not travel over a process group: {e}") from e
    if not as_it_was:
        raise UnsupportedError(
            "this does not travel over a process group: something in it has no type in msgpack"
        )
    if len(data) > _MAX_BYTES:
        raise UnsupportedError(
            f"this does not travel over a process group: {len(data)} bytes, and {_MAX_BYTES} are the most"
        )
    return data


def _unpacked(data: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise WireError(f"not the bytes of a value: {e}") from e
