"""What the two ABCs of a connector say where a connector says nothing, and the values that cross."""

from __future__ import annotations

from typing import Any

from kvplug.engine import SchedulerConnector, WorkerConnector, WorkerOutput


def least(side: Any) -> Any:
    """A side with nothing but what every one must have."""
    methods = {name: lambda self, *given: None for name in side.__abstractmethods__}
    return type("Least", (side,), methods)()


def test_a_connector_that_says_nothing_is_best_effort_and_wants_no_further_step() -> None:
    side = least(SchedulerConnector)
    assert side.requires_kv_delivery is False
    assert side.has_pending_push_work() is False
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
