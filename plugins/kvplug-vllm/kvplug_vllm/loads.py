"""Loads that fail after vLLM has counted on them.

When vLLM plans a load, it already offers the load's blocks to other requests as cached, and counts its tokens
as cached. If the load fails, vLLM takes back only a part of this; the classes of this module do the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from kvplug.engine import Request, ScheduledRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request as VllmRequest


@attrs.frozen
class _Load:
    request: Request
    start: int
    """The first token to load; earlier tokens are in vLLM's cache."""
    block_ids: tuple[int, ...]
    """All blocks of the request, in token order."""


class StepLoads:
    """The loads of one step, in an engine that plans the next step after this one is reported.

    vLLM 0.32 offers the blocks of such a load to other requests as soon as they are allocated. If the load
    fails, vLLM makes running requests compute them. But a request that has ended in the meantime leaves its
    blocks in the prefix cache. If several requests share the blocks, vLLM makes only one of them compute the
    blocks, and that one may end first.
    """

    def __init__(self) -> None:
        self._loads: list[_Load] = []

    def add(self, request: Request, start: int, block_ids: Iterable[int]) -> None:
        self._loads.append(_Load(request, start, tuple(block_ids)))

    def are_shared_by(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether vLLM's cache hit for the request may include blocks that are being loaded."""
        return any(
            load.start < num_computed_tokens
            and load.request.token_ids[: load.start + 1] == request.token_ids[: load.start + 1]
            for load in self._loads
        )

    def end(self, invalid_block_ids: set[int]) -> set[int]:
        """End a reported step. Returns the blocks that failed to load, or were computed from such blocks."""
        blocks = set[int]()
        for load in self._loads:
            at = next((at for at, block in enumerate(load.block_ids) if block in invalid_block_ids), None)
            blocks |= set() if at is None else set(load.block_ids[at:])
        self._loads = []
        return blocks


class CountedLoads:
    """Corrects a request's ``cached_tokens`` when its load has failed.

    vLLM counts a load's tokens when it is planned, and does not correct this if it computes them itself.
    """

    def __init__(self) -> None:
        self._loads: dict[str, tuple[VllmRequest, int, int]] = {}

    def add(self, request: VllmRequest, start: int, num_tokens: int) -> None:
        """Record a planned load of ``num_tokens`` tokens from ``start`` on."""
        self._loads[request.request_id] = request, start, num_tokens

    def correct(self, scheduled: Iterable[ScheduledRequest]) -> None:
        """Lower the counts of the planned step's requests that compute tokens of their load.

        The count of a preempted request, or of one with its first token, is final.
        """
        for each in scheduled if self._loads else ():
            load = self._loads.get(each.request_id)
            if load is None:
                continue
            request, start, num_tokens = load
            stats = getattr(request, "prefill_stats", None)  # some releases count differently
            if stats is None or request.num_preemptions:
                self.forget(each.request_id)
                continue
            loaded = max(0, each.num_computed_tokens - start)
            if loaded < num_tokens:
                stats.set(
                    num_prompt_tokens=stats.num_prompt_tokens,
                    num_local_cached_tokens=stats.num_local_cached_tokens,
                    num_external_cached_tokens=loaded,
                )
                self._loads[each.request_id] = request, start, loaded

    def forget(self, request_id: str) -> None:
        """Remove an ended request."""
        self._loads.pop(request_id, None)
