"""What the scheduler side tells the worker side in one step, and what it hears back: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class LoadPlan:
    """Load tokens ``start`` to ``end`` of a prompt into the request's blocks."""

    request_id: str
    token_ids: tuple[int, ...]
    """The prompt up to ``end``."""
    extra: bytes
    block_ids: tuple[int, ...]
    start: int
    in_background: bool

    @property
    def end(self) -> int:
        return len(self.token_ids)


@attrs.frozen(kw_only=True)
class SavePlan:
    """Gather tokens ``start`` to ``end`` of a prompt; store it once the last token is there."""

    request_id: str
    token_ids: tuple[int, ...]
    """The whole prompt in its first step (``start`` is 0), else empty."""
    extra: bytes
    block_ids: tuple[int, ...]
    start: int
    end: int
    is_last: bool


@attrs.frozen(kw_only=True)
class StepPlan:
    """Everything one step does."""

    step: int = 0
    """The engine's number of it."""
    heard: int = -1
    """The latest step that a worker side has reported something about and that the scheduler side had
    heard of when it made this plan: with several steps in flight not always the step before."""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    forget: tuple[str, ...] = ()
    """Requests that ended or were preempted: stop whatever goes on for them."""
    reset: bool = False
    """Before anything else: forget all that was gathered or stored until now."""

    def to_plain(self) -> dict[str, Any]:
        return attrs.asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> StepPlan:
        return cls(
            step=plain["step"],
            heard=plain["heard"],
            loads=tuple(LoadPlan(**{**load, **_tuples(load)}) for load in plain["loads"]),
            saves=tuple(SavePlan(**{**save, **_tuples(save)}) for save in plain["saves"]),
            forget=tuple(plain["forget"]),
            reset=plain["reset"],
        )


def _tuples(plan: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {"token_ids": tuple(plan["token_ids"]), "block_ids": tuple(plan["block_ids"])}
