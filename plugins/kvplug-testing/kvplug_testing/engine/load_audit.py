"""Checks a connector's reports against its promises: promised loads, and kept blocks."""

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
    is_checked: bool = True
    """Whether its content can be checked: its request has not ended, and the weights have not changed."""


class LoadAudit:
    """Checks each report of a worker side at the end of a step."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self.loads: dict[str, Load] = {}
        """Loads by request, until they end."""
        self.kept: set[str] = set()
        """Ended requests whose blocks are kept until they are named."""
        self._may_be_named: set[str] = set()
        self.must_arrive = True
        """Whether nothing has happened that could make a load fail."""
        self.num_loaded = 0
        """Number of loaded tokens."""
        self.num_failed = 0
        """Number of loads with invalid blocks."""

    def promise(self, request: Request, num_computed: int, found: int | None, is_async: bool) -> None:
        """Record the answer of ``get_num_new_matched_tokens``."""
        total, end = len(request.token_ids), num_computed + (found or 0)
        if found is None or (found == 0 and not is_async):
            return
        said = f"{found} tokens beyond {num_computed} are promised to {request.request_id}, of {total}"
        assert found > 0, f"{said}, in the background: {is_async}"
        assert end == total or (end < total and end % self._cache.block_size == 0), f"{said}: no whole blocks"

    def begin(self, load: Load) -> None:
        """Record that blocks are allocated for a load."""
        self.loads[load.request.request_id] = load

    def drop(self, request_id: str) -> None:
        """The request has lost its blocks before any step knew of them."""
        self.loads.pop(request_id, None)

    def plan(self, step: int) -> bool:
        """Assign the loads begun since the last plan to this step. Returns whether it must wait for one."""
        fresh = [load for load in self.loads.values() if not load.step]
        for load in fresh:
            load.step = step
        return any(not load.is_async for load in fresh)

    def end(self, request_id: str, keeps: bool, *, is_reported: bool) -> None:
        """The request has ended. ``is_reported``: a report that names it has not reached the scheduler
        yet.
        """
        load = self.loads.get(request_id)
        if load is not None:
            load.is_checked = False
            if load.is_async and load.step and not keeps:
                self._may_be_named.add(request_id)  # a report of it may be in flight
            if not load.step or (load.is_async and not keeps):
                del self.loads[request_id]
        if keeps and not is_reported:
            self.kept.add(request_id)

    def judge(self, step: int, report: WorkerOutput) -> None:
        """Check the worker side's report of an executed step.

        Raises:
            AssertionError: the report breaks a promise; the message says which.
        """
        sent, received = set(report.finished_sending), set(report.finished_recving)
        assert not sent & received, f"step {step}: {sorted(sent & received)} is named as sent and as received"
        for name, load in list(self.loads.items()):
            if not load.step or load.step > step:
                continue
            load.invalid |= report.invalid_block_ids & set(load.blocks)
            if name in received or not load.is_async:
                self._check(load, step)
                del self.loads[name]
            if name in received:
                received.remove(name)
                self.kept.discard(name)
        assert not sent & self.loads.keys(), f"step {step}: a request is named as sent while it loads: {sent}"
        unexpected = sorted((sent - self.kept | received) - self._may_be_named)
        assert not unexpected, f"step {step}: {unexpected} was named before, or nothing of it was under way"
        self._may_be_named -= sent | received
        self.kept -= sent | received

    def _check(self, load: Load, step: int) -> None:
        """Check an ended load: every block of it is right or was reported."""
        who = f"request {load.request.request_id}, tokens {load.start} to {load.end}"
        if not load.is_checked:
            return
        wrong = self._cache.wrong_blocks(load.request.token_ids, load.blocks, load.start, load.end)
        unsaid = sorted(wrong - load.invalid)
        assert not unsaid, f"step {step}: wrong KV was loaded into blocks {unsaid} ({who}), and not reported"
        if load.invalid:
            self.num_failed += 1
            assert not self.must_arrive, f"step {step}: what was promised did not come ({who})"
        else:
            self.num_loaded += load.end - load.start
