"""Loads of the current step: no other request may use their blocks before the step is reported."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvplug.engine import Request


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
