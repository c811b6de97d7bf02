"""What the two ABCs of a connector say where a connector says nothing, and the values that cross."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug import UnsupportedError
from kvplug.engine import ScheduledRequest, SchedulerConnector, SchedulerOutput, WorkerConnector, WorkerOutput


def least(side: Any) -> Any:
    """A side with nothing but what every one must have."""
    methods = {name: lambda self, *given: None for name in side.__abstractmethods__}
    return type("Least", (side,), methods)()


def test_a_connector_that_says_nothing_is_best_effort_and_wants_no_further_step() -> None:
    side = least(SchedulerConnector)
    assert side.requires_kv_delivery is False
    assert side.has_pending_push_work() is False
    assert side.get_finished_count() is None
    assert side.reset_cache() is False, "it may hold what it does not know how to forget"
    assert list(side.take_events()) == []
    assert side.get_stats() is None
    side.update_connector_output(WorkerOutput())


def test_a_worker_side_that_says_nothing_has_nothing_to_report() -> None:
    side = least(WorkerConnector)
    assert not side.has_connector_metadata()
    side.bind_connector_metadata({})
    assert side.has_connector_metadata()
    assert (side.get_stats(), list(side.take_events()), side.build_worker_metadata()) == (None, [], None)
    side.clear_connector_metadata()
    assert not side.has_connector_metadata()


def test_a_worker_side_that_takes_layers_only_says_so() -> None:
    with pytest.raises(UnsupportedError, match="Least does not take cross-layer blocks"):
        least(WorkerConnector).register_cross_layers_kv_cache(None, None)


def plan(block_ids: Any) -> SchedulerOutput:
    scheduled = (ScheduledRequest(request_id="a", num_computed_tokens=0, num_scheduled_tokens=3),)
    return SchedulerOutput(step=1, scheduled=scheduled, block_ids=block_ids)


def test_block_tables_are_looked_up_by_whoever_wants_them() -> None:
    asked: list[str] = []
    output = plan(lambda request_id: asked.append(request_id) or ((4, 7),))
    assert asked == []
    assert output.block_ids(output.scheduled[0].request_id) == ((4, 7),)
    assert asked == ["a"]


def test_two_plans_are_compared_by_what_they_do_and_not_by_how_blocks_are_looked_up() -> None:
    assert plan({}.get) == plan({"a": ((1,),)}.get)
    assert plan({}.get) != attrs.evolve(plan({}.get), step=2)
    assert "block_ids" not in repr(plan({}.get))
