"""The plan that the scheduler side sends to the worker side in each step, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvplug.engine import BlockIds


@attrs.frozen(kw_only=True)
class HoldPlan:
    """Keep the blocks of a finished request."""

    request_id: str
    lease: int
    block_ids: BlockIds
    traceparent: str = ""
    """The context of the request in its trace."""


@attrs.frozen(kw_only=True)
class PullPlan:
    """Pull tokens ``start`` to ``end`` of a request out of a producer's blocks into its own."""

    request_id: str
    claim: str
    engine_id: str
    """The producer's id."""
    peer: Any = attrs.field(repr=False)
    """The producer's address, the contacts of its workers by rank, or ``None``."""
    block_size: int
    """Of the producer, like :attr:`tensor_parallel_size`."""
    tensor_parallel_size: int
    theirs: BlockIds
    ours: BlockIds
    start: int
    end: int
    in_background: bool
    traceparent: str = ""


@attrs.frozen(kw_only=True)
class StepPlan:
    """Everything that one step does."""

    step: int = 0
    last_report: int = -1
    """The latest step whose report the scheduler side had received when it made this plan."""
    epoch: str = ""
    key: bytes = attrs.field(default=b"", repr=False)
    """Signs references."""
    holds: tuple[HoldPlan, ...] = ()
    revoked: tuple[str, ...] = ()
    """Requests whose blocks were found to hold wrong KV."""
    pulls: tuple[PullPlan, ...] = ()
    is_reset: bool = False
    """Withdraw all blocks that were handed off, including :attr:`holds`."""
    forget: tuple[str, ...] = ()
    """Requests that ended or were preempted: stop pulling for them."""

    def to_plain(self) -> dict[str, Any]:
        return attrs.asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> StepPlan:
        holds = tuple(
            HoldPlan(**{**each, "block_ids": _tables(each["block_ids"])}) for each in plain["holds"]
        )
        pulls = tuple(
            PullPlan(**{**each, "theirs": _tables(each["theirs"]), "ours": _tables(each["ours"])})
            for each in plain["pulls"]
        )
        revoked, forget = tuple(plain["revoked"]), tuple(plain["forget"])
        return cls(**{**plain, "holds": holds, "pulls": pulls, "revoked": revoked, "forget": forget})


def _tables(plain: Any) -> BlockIds:
    return tuple(tuple(table) for table in plain)
