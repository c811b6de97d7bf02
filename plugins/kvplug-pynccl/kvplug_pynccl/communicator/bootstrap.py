"""Before NCCL starts: what the ranks must have in common, the unique id, and what a refusal of NCCL means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvplug import ConfigError, TransportError
from kvplug.net.wire import from_plain
from kvplug.transport import WireError
from kvplug_pynccl.device import Device
from kvplug_pynccl.nccl.abi import UNIQUE_ID_BYTES, UniqueId, Version
from kvplug_pynccl.nccl.errors import NcclInvalidUsageError
from kvplug_pynccl.nccl.library import Library


@attrs.frozen(kw_only=True)
class RankHello:
    """The message of each rank to the others before NCCL starts."""

    nccl: int
    """``NCCL_VERSION_CODE``."""
    check_order: bool
    gpu: str
    """Identifies its GPU among all; empty if unknown."""
    id: bytes = b""
    """The unique id of NCCL, which rank 0 makes."""

    @classmethod
    def of(cls, rank: int, nccl: Library, device: Device, *, check_order: bool) -> RankHello:
        """Raises NcclError: NCCL gives rank 0 no id."""
        return cls(
            nccl=nccl.version.code,
            check_order=check_order,
            gpu=device.identity,
            id=b"" if rank else bytes(nccl.get_unique_id()),
        )


def agree(messages: Sequence[Any]) -> tuple[UniqueId, list[RankHello]]:
    """Return the unique id and the hellos of all ranks, from their plain values in the order of ranks. Pure.

    Raises:
        ConfigError: they do not agree on an option.
        TransportError: they have different releases of NCCL.
        WireError: a message is not a hello, or the unique id is not rank 0's.
    """
    hellos = [
        from_plain(each, RankHello, f"the first message of rank {rank}") for rank, each in enumerate(messages)
    ]
    first = hellos[0]
    if any(each.nccl != first.nccl for each in hellos):
        have = ", ".join(f"rank {rank} has {Version.of(each.nccl)}" for rank, each in enumerate(hellos))
        raise TransportError(f"the ranks of a communicator need the same release of NCCL: {have}")
    if any(each.check_order != first.check_order for each in hellos):
        have = ", ".join(f"rank {rank} has {each.check_order}" for rank, each in enumerate(hellos))
        raise ConfigError(f"check_order must be the same at every rank: {have}")
    if len(first.id) != UNIQUE_ID_BYTES or any(each.id for each in hellos[1:]):
        raise WireError("exactly one unique id of NCCL must come, from rank 0")
    return UniqueId.of(first.id), hellos


def explain_invalid_usage(error: NcclInvalidUsageError, hellos: Sequence[RankHello]) -> NcclInvalidUsageError:
    """Return the error. If several ranks have the same GPU, it names them."""
    by_gpu: dict[str, list[str]] = {}
    for rank, each in enumerate(hellos):
        if each.gpu:
            by_gpu.setdefault(each.gpu, []).append(f"rank {rank}")
    shared = [
        f"{' and '.join(ranks)} have the same GPU ({gpu})" for gpu, ranks in by_gpu.items() if len(ranks) > 1
    ]
    if not shared:
        return error
    text = f"{'; '.join(shared)}, and each rank needs one of its own: {error}"
    return NcclInvalidUsageError(text, result=error.result, function=error.function)
