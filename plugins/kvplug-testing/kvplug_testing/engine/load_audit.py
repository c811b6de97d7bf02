"""Checks a connector's promises: what is promised is loaded, or reported."""

from __future__ import annotations

import attrs

from kvplug.engine import Request, WorkerOutput
from kvplug_testing.engine.cache import PagedCache


@attrs.define(eq=False)
class Load:
    """Tokens that the connector has promised to load."""

    request: Request
    blocks: tuple[int, ...]
    start: int
    end: int
    is_async: bool
    step: int = 0
    """The first step planned after the promise; 0 if there is none yet."""
    invalid: set[int] = attrs.field(factory=set)
    """Its blocks that were reported as invalid."""
    has_ended: bool = False
    """Whether a report of the worker side names its end. The scheduler side may not have it yet."""
    is_checked: bool = True
    """Whether its content can be checked: its request has not ended."""


class LoadAudit:
    """Checks each report of a worker side at the end of a step."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self.loads: dict[str, Load] = {}
        """Loads by request, until the scheduler side has the report of their end."""
        self.must_arrive = True
        """Whether nothing has happened that could make a load fail."""
        self.num_loaded = 0
        """Number of loaded tokens."""
        self.num_failed = 0
        """Number of loads with invalid blocks."""

    def promise(self, request: Request, num_computed: int, found: int | None, is_async: bool) -> None:
        """Check the answer of ``get_num_new_matched_tokens``."""
        total, end = len(request.token_ids), num_computed + (found or 0)
        if found is None or (found == 0 and not is_async):
            return
        text = f"{found} tokens beyond {num_computed} are promised to {request.request_id}, of {total}"
        assert found > 0, f"{text}, in the background: {is_async}"
        assert end == total or (end < total and end % self._cache.block_size == 0), f"{text}: no whole blocks"

    def plan(self, step: int) -> bool:
        """Assign the loads begun since the last plan to this step. Returns whether it must wait for one."""
        fresh = [load for load in self.loads.values() if not load.step]
        for load in fresh:
            load.step = step
        return any(not load.is_async for load in fresh)

    def judge(self, step: int, report: WorkerOutput) -> None:
        """Check the loads that have ended with an executed step: every block is right or was reported.

        Raises:
            AssertionError: one is neither; the message names it.
        """
        for name, load in [*self.loads.items()]:
            if load.has_ended or not 0 < load.step <= step:
                continue
            load.invalid |= report.invalid_block_ids & set(load.blocks)
            load.has_ended = not load.is_async or name in report.finished_recving
            if load.has_ended and load.is_checked:
                self._check(load, step)
            if not load.is_async:
                del self.loads[name]

    def _check(self, load: Load, step: int) -> None:
        who = f"request {load.request.request_id}, tokens {load.start} to {load.end}"
        wrong = self._cache.wrong_blocks(load.request.token_ids, load.blocks, load.start, load.end)
        silent = sorted(wrong - load.invalid)
        assert not silent, f"step {step}: wrong KV was loaded into blocks {silent} ({who}), and not reported"
        if load.invalid:
            self.num_failed += 1
            assert not self.must_arrive, f"step {step}: what was promised did not come ({who})"
        else:
            self.num_loaded += load.end - load.start
