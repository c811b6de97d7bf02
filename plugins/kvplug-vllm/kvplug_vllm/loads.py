"""Loads that vLLM counts on before they have succeeded."""

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
        """The step is reported. Returns the blocks that failed to load, or were computed from those."""
        blocks = set[int]()
        for load in self._loads:
            at = next((at for at, block in enumerate(load.block_ids) if block in invalid_block_ids), None)
            blocks |= set() if at is None else set(load.block_ids[at:])
        self._loads = []
        return blocks


class CountedLoads:
    """Corrects a request's ``cached_tokens`` when its load has failed.

    vLLM counts the tokens of a load when it is planned, and not again when it computes them itself.
    """

    def __init__(self) -> None:
        self._loads: dict[str, tuple[VllmRequest, int, int]] = {}

    def add(self, request: VllmRequest, start: int, num_tokens: int) -> None:
        """So many tokens from ``start`` on are to be loaded."""
        self._loads[request.request_id] = request, start, num_tokens

    def correct(self, scheduled: Iterable[ScheduledRequest]) -> None:
        """A step is planned: a request that computes what was to be loaded has loaded less.

        A request whose first token is out, or that was preempted, has been counted.
        """
        for each in scheduled if self._loads else ():
            load = self._loads.get(each.request_id)
            if load is None:
                continue
            request, start, num_tokens = load
            stats = getattr(request, "prefill_stats", None)  # some releases count in another way
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
        """The request has ended."""
        self._loads.pop(request_id, None)
