"""Loads that the step under way needs: until it is reported, nobody else may build on them."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvplug.engine import Request


@attrs.frozen
class _Load:
    request: Request
    start: int
    """Its first token; what comes before was in the cache."""
    block_ids: tuple[int, ...]
    """All of the request's, in token order."""


class StepLoads:
    """The loads of one step, of an engine that plans the next when it has heard of this one.

    vLLM 0.32 offers the blocks of such a load to others as soon as they are allocated. Where it fails, the
    requests that run are made to compute them; but one that has ended meanwhile leaves its blocks in
    the prefix cache, and one of several that share them only is to compute them, and may end before.
    """

    def __init__(self) -> None:
        self._loads: list[_Load] = []

    def add(self, request: Request, start: int, block_ids: Iterable[int]) -> None:
        self._loads.append(_Load(request, start, tuple(block_ids)))

    def are_shared_by(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether what vLLM found in its cache for the request may be what is being loaded."""
        return any(
            load.start < num_computed_tokens
            and load.request.token_ids[: load.start + 1] == request.token_ids[: load.start + 1]
            for load in self._loads
        )

    def end(self, invalid_block_ids: set[int]) -> set[int]:
        """The step is reported. Returns the blocks that hold, or were computed from, what failed."""
        blocks = set[int]()
        for load in self._loads:
            at = next((at for at, block in enumerate(load.block_ids) if block in invalid_block_ids), None)
            blocks |= set() if at is None else set(load.block_ids[at:])
        self._loads = []
        return blocks
