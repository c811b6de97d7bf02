"""How the ranks begin: what they must have in common, the unique id, and what a refusal of NCCL means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvplug import ConfigError, TransportError
from kvplug.transport import WireError
from kvplug_pynccl.device import Device
from kvplug_pynccl.nccl.abi import UNIQUE_ID_BYTES, UniqueId, Version
from kvplug_pynccl.nccl.errors import NcclInvalidUsageError
from kvplug_pynccl.nccl.library import Library


@attrs.frozen(kw_only=True)
class Greeting:
    """What a rank says of itself before NCCL starts."""

    rank: int
    world_size: int
    nccl: int
    """``NCCL_VERSION_CODE``."""
    check_order: bool
    gpu: str
    """Tells its GPU from all others; empty if unknown."""
    id: bytes = b""
    """The unique id, which rank 0 makes."""

    @classmethod
    def of(cls, rank: int, world_size: int, nccl: Library, device: Device, *, check_order: bool) -> Greeting:
        """Raises NcclError: rank 0 can make no id."""
        return cls(
            rank=rank,
            world_size=world_size,
            nccl=nccl.version.code,
            check_order=check_order,
            gpu=device.identity,
            id=b"" if rank else bytes(nccl.get_unique_id()),
        )

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Greeting:
        """Raises WireError: it is none."""
        fields = {field.name: said.get(field.name) for field in attrs.fields(cls)}
        kinds = {"rank": int, "world_size": int, "nccl": int, "check_order": bool, "gpu": str, "id": bytes}
        if any(type(fields[name]) is not kind for name, kind in kinds.items()):
            raise WireError(f"a rank does not greet as this version does: {dict(said)!r:.200}")
        return cls(**fields)  # type: ignore[arg-type]


def agreed(said: Sequence[Mapping[str, Any]]) -> tuple[UniqueId, list[Greeting]]:
    """What all ranks have said, in order. Pure.

    Raises:
        ConfigError: they do not agree on the world size, on who they are, or on an option.
        TransportError: they have different releases of NCCL.
        WireError: these are no greetings.
    """
    greetings = [Greeting.read(each) for each in said]
    for number, each in enumerate(greetings):
        if (each.rank, each.world_size) != (number, len(greetings)):
            raise ConfigError(
                f"rank {number} of {len(greetings)} says that it is rank {each.rank} of {each.world_size};"
                " all ranks must have one world size, and each a rank of its own"
            )
    first = greetings[0]
    if any(each.nccl != first.nccl for each in greetings):
        have = ", ".join(f"rank {each.rank} has {Version.of(each.nccl)}" for each in greetings)
        raise TransportError(f"the ranks of a communicator need the same release of NCCL: {have}")
    if any(each.check_order != first.check_order for each in greetings):
        have = ", ".join(f"rank {each.rank} has {each.check_order}" for each in greetings)
        raise ConfigError(f"check_order must be the same at every rank: {have}")
    if len(first.id) != UNIQUE_ID_BYTES or any(each.id for each in greetings[1:]):
        raise WireError("one unique id of NCCL is wanted, from rank 0")
    return UniqueId.of(first.id), greetings


def explained(error: NcclInvalidUsageError, greetings: Sequence[Greeting]) -> NcclInvalidUsageError:
    """With what is known of the ranks: which of them have one GPU."""
    by_gpu: dict[str, list[str]] = {}
    for each in greetings:
        if each.gpu:
            by_gpu.setdefault(each.gpu, []).append(f"rank {each.rank}")
    shared = [
        f"{' and '.join(ranks)} have the same GPU ({gpu})" for gpu, ranks in by_gpu.items() if len(ranks) > 1
    ]
    if not shared:
        return error
    text = f"{'; '.join(shared)}, and each rank needs one of its own: {error}"
    return NcclInvalidUsageError(text, result=error.result, function=error.function)
