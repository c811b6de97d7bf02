"""Blocks in use, and the requests that are named as sent or received (laws CONN-4 and CONN-5).

The random schedules have requests that end while they load.
"""

from __future__ import annotations

from functools import partial

import attrs

from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite, Promise
from kvplug_testing.engine import PlannedStep, request_of
from kvplug_testing.waits import Call

_PREEMPTED = frozenset({"a"})


class BlocksInUse(ConnectorSuite):
    """An engine that reuses blocks for another request as soon as it may."""

    @law("CONN-4", "CONN-5")
    def test_blocks_that_were_kept_for_a_consumer_that_is_shut_down_are_free_again(self) -> None:
        prefill, decode = self.pair()
        stored = request_of("s", PROMPT)
        blocks = prefill.admit(stored)
        self.run(prefill.step, [(stored, blocks, 0, 100)])
        keeps, params = prefill.finish(stored, blocks)
        named: list[str] = []

        asking = Call(partial(decode.matched, request_of("a", PROMPT, params=params)))

        def step() -> bool:
            """Whether the consumer has its answer after one more step."""
            report = self.run(prefill.step, [])
            named.extend(report.finished_sending)
            assert not report.finished_recving, "nothing was loaded, and something is named as received"
            return asking.ended

        waits.until(step, what="an answer other than 'not yet'")
        self.shut(decode)
        waits.until(
            lambda: step() and (named or not keeps), what="a step that names s, whose blocks are kept"
        )
        for _ in range(3):
            step()
        assert named == ["s"] * keeps, f"named as sent are {named}; the blocks are kept: {keeps}"
        prefill.cache.free(blocks)
        prefill.free_blocks = [*blocks, *prefill.free_blocks]  # the next request gets them
        params = self.stored(prefill, range(5000, 5100), "other")
        decode = self.engine("consumer", seed=3)
        self.meet(decode)
        prompt = request_of("b", range(5000, 5100), params=params)
        self.check_loads(decode, prompt, "one consumer is gone, and the next one gets nothing")

    # -- preempted requests: their former blocks are neither read nor written any more -------------------

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
