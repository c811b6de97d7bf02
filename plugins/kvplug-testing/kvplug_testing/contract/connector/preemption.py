"""Preempted requests: their former blocks are neither read nor written any more (laws CONN-4 and CONN-5)."""

from __future__ import annotations

from typing import Any

import attrs

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import ConnectorSuite, Promise
from kvplug_testing.engine import PlannedStep

_PREEMPTED = frozenset({"a"})


class Preemption(ConnectorSuite):
    """An engine that preempts a request, and does not reuse its blocks."""

    @law("CONN-4", "CONN-5")
    def test_what_is_preempted_before_a_step_was_told_of_its_load_is_not_loaded(self) -> None:
        load = self.loading()
        self._is_left_alone(load, load.engine.plan([], preempted=_PREEMPTED))
        again = attrs.evolve(load.prompt, generation=1)
        found, _ = self.run(load.engine.ask, again)
        assert found, "nothing is promised to a request that was preempted before its load"
        blocks = load.engine.allocate(100)
        load.engine.scheduler.update_state_after_alloc(again, (blocks,), found)
        report = self.run(load.engine.step, [(again, blocks, found, 100 - found)])
        assert not report.invalid_block_ids, "it comes again, and its load fails"
        assert load.engine.is_right(again.token_ids, blocks, 100), "the KV is wrong"

    @law("CONN-4", "CONN-5")
    def test_what_is_preempted_after_a_load_that_failed_is_not_reported_later(self) -> None:
        load = self.loading()
        first = load.engine.plan([load.work])
        second = load.engine.plan([], preempted=_PREEMPTED)
        with self.injecting_fault():
            self.run(load.engine.execute, first)
        self.skip_unless_injected()
        self._is_left_alone(load, second)

    @law("CONN-4", "CONN-5", needs="background")
    def test_what_is_preempted_while_it_loads_in_the_background_is_let_alone(self) -> None:
        load = self.loading(background=True)
        report = self.run(load.engine.step, [])
        planned = load.engine.plan([], preempted=_PREEMPTED)
        self._is_left_alone(load, planned, named=len(report.finished_recving))

    def _is_left_alone(self, load: Promise, planned: PlannedStep, *, named: int = 0) -> None:
        """Preempt the request. Its blocks stay unchanged in that step and the next ones, and nothing says
        more of it. ``named``: how often the request was named as received before.
        """
        engine = load.engine
        self.run(engine.worker.handle_preemptions, _PREEMPTED)
        engine.cache.free(load.blocks)  # as soon as the worker side knows of it
        reports: list[Any] = [self.run(engine.execute, attrs.evolve(planned, preempted=frozenset()))]
        engine.hear(reports[0])
        reports += [self.run(engine.step, []) for _ in range(5)]
        written = sorted(engine.cache.written(load.blocks))
        assert not written, f"blocks {written} were written after the request that had them was preempted"
        received = [name for report in reports for name in report.finished_recving]
        allowed = ["a"] if load.is_async and not named else []
        assert received in ([], allowed), f"named as received are {received}; a was preempted"
        sent = [name for report in reports for name in report.finished_sending]
        assert not sent, f"named as sent are {sent}; a was preempted"
        invalid = {block for each in reports for block in each.invalid_block_ids}
        assert load.is_async or not invalid, (
            f"blocks {sorted(invalid)} are reported, which a had before it was preempted"
        )
