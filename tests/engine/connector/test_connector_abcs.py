"""What the two ABCs of a connector say where a connector says nothing, and the values that cross."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug import UnsupportedError
from kvplug.engine import ScheduledRequest, SchedulerConnector, SchedulerOutput, WorkerConnector, WorkerOutput


class Scheduler(SchedulerConnector):
    """Nothing but what every scheduler side must have."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None:
        return None

    def build_connector_meta(self, output: SchedulerOutput) -> dict[str, Any]:
        return {one.request_id: output.block_ids(one.request_id) for one in output.scheduled}

    def request_finished(self, request: Any, block_ids: Any, end: Any) -> tuple[bool, None]:
        return False, None

    def shutdown(self) -> None:
        return None


class Worker(WorkerConnector):
    """The same for the worker side."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        return None

    def start_load_kv(self) -> None:
        return None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_finished(self, finished_request_ids: Any) -> tuple[frozenset[str], frozenset[str]]:
        return frozenset(), frozenset()

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return frozenset()

    def shutdown(self) -> None:
        return None


def test_a_connector_that_says_nothing_is_best_effort_and_wants_no_further_step() -> None:
    side = Scheduler()
    assert side.requires_kv_delivery is False
    assert side.has_pending_push_work() is False
    assert side.get_finished_count() is None
    assert side.reset_cache() is False, "it may hold what it does not know how to forget"
    assert list(side.take_events()) == []
    assert side.get_stats() is None
    side.update_connector_output(WorkerOutput())


def test_a_worker_side_that_says_nothing_has_nothing_to_report() -> None:
    side = Worker()
    assert not side.has_connector_metadata()
    side.bind_connector_metadata({})
    assert side.has_connector_metadata()
    assert (side.get_stats(), list(side.take_events()), side.build_worker_metadata()) == (None, [], None)
    side.clear_connector_metadata()
    assert not side.has_connector_metadata()


def test_a_worker_side_that_takes_layers_only_says_so() -> None:
    with pytest.raises(UnsupportedError, match="Worker does not take cross-layer blocks"):
        Worker().register_cross_layers_kv_cache(None, None)  # type: ignore[arg-type]


def plan(block_ids: Any) -> SchedulerOutput:
    scheduled = (ScheduledRequest(request_id="a", num_computed_tokens=0, num_scheduled_tokens=3),)
    return SchedulerOutput(step=1, scheduled=scheduled, block_ids=block_ids)


def test_block_tables_are_looked_up_by_whoever_wants_them() -> None:
    asked: list[str] = []

    def block_ids(request_id: str) -> tuple[tuple[int, ...], ...]:
        asked.append(request_id)
        return ((4, 7),)

    output = plan(block_ids)
    assert asked == []
    assert Scheduler().build_connector_meta(output) == {"a": ((4, 7),)}
    assert asked == ["a"]


def test_two_plans_are_compared_by_what_they_do_and_not_by_how_blocks_are_looked_up() -> None:
    assert plan({}.get) == plan({"a": ((1,),)}.get)
    assert plan({}.get) != attrs.evolve(plan({}.get), step=2)
    assert "block_ids" not in repr(plan({}.get))
