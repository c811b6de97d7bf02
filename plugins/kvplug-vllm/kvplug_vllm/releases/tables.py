"""The block tables of the requests in a step.

Since 0.30, a method of vLLM's step plan returns them. Before, a plan has only the additions to each table, so
the adapter keeps the tables itself; also for 0.29, which only returns tables that the step has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvplug.engine import BlockIds

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

Lookup = Callable[[str], BlockIds]
"""The blocks of a request in the step, group by group. Raises ``KeyError`` for one that is not scheduled."""


def block_tables() -> Callable[[SchedulerOutput], Lookup]:
    """A function to call once with the plan of every step, in order; it returns that step's tables."""
    from vllm.v1.core.sched import output

    state = getattr(output, "KVConnectorBlockState", None)
    return offered_by_method if hasattr(state, "get_block_ids") else KeptTables().of


def offered_by_method(output: SchedulerOutput) -> Lookup:
    """The tables of this step's plan, which vLLM resolves on request."""
    state = _state_of(output)
    return lambda request_id: _found(request_id, state.get_block_ids(request_id))


class KeptTables:
    """The tables of all requests that were scheduled and have not ended."""

    def __init__(self) -> None:
        self._tables: dict[str, list[list[int]]] = {}

    def __len__(self) -> int:
        """The number of requests with a table."""
        return len(self._tables)

    def of(self, output: SchedulerOutput) -> Lookup:
        """Apply one step's plan; returns its tables."""
        for request_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(group) for group in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(group) for group in blocks or ()]
            elif blocks is not None:
                for group, more in zip(self._tables[request_id], blocks, strict=True):
                    group.extend(more)
        scheduled = frozenset(output.num_scheduled_tokens)
        return lambda request_id: _found(
            request_id, self._tables[request_id] if request_id in scheduled else None
        )


def _state_of(output: SchedulerOutput) -> Any:
    state = output.kv_connector_block_state
    assert state is not None, "vLLM offers its block tables to connectors while it builds their metadata"
    return state


def _found(request_id: str, groups: Iterable[Iterable[int]] | None) -> BlockIds:
    if groups is None:
        raise KeyError(f"request {request_id} is not scheduled in this step")
    return tuple(tuple(group) for group in groups)
