"""Preempted requests: their former blocks are neither read nor written any more (laws CONN-4 and CONN-5)."""

from __future__ import annotations

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
        blocks = load.engine.allocate(100)
        load.engine.scheduler.update_state_after_alloc(again, (blocks,), found)
        late = Promise(load.engine, again, blocks, found, is_async=False)
        assert found and not self.run_load(late), "it comes again, and its load fails"

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
        """Preempt the request. Its blocks stay unchanged in that step and the next ones, and no report names
        it again. ``named``: how often the request was named as received before.
        """
        engine = load.engine
        self.run(engine.worker.handle_preemptions, _PREEMPTED)
        engine.cache.free(load.blocks)  # as soon as the worker side knows of it
        reports = [self.run(engine.execute, attrs.evolve(planned, preempted=frozenset()))]
        engine.hear(reports[0])
        reports += [self.run(engine.step, []) for _ in range(5)]
        written = sorted(engine.cache.written(load.blocks))
        assert not written, f"blocks {written} were written after the request that had them was preempted"
        received = [name for report in reports for name in report.finished_recving]
        assert received in ([], ["a"] * (load.is_async and not named)), f"named as received are {received}"
        assert not any(report.finished_sending for report in reports), "a was preempted, and is named as sent"
        assert load.is_async or not any(report.invalid_block_ids for report in reports), (
            "blocks are reported, which a had before it was preempted"
        )
