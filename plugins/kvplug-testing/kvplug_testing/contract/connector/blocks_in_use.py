"""Blocks in use, and the requests that are named as sent or received (laws CONN-4 and CONN-5)."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug.engine import RequestEnd
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite, Promise
from kvplug_testing.engine import PlannedStep, request_of

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
        prompt = request_of("a", PROMPT, params=params)
        decode.scheduler.on_new_request(prompt)
        named: list[str] = []

        def step() -> None:
            report = self.run(prefill.step, [])
            named.extend(sorted(report.finished_sending))
            assert not report.finished_recving, "nothing was loaded, and something is named as received"

        def is_known() -> bool:
            found, _ = self.run(decode.scheduler.get_num_new_matched_tokens, prompt, 0)
            if found is None:
                step()
            return found is not None

        def is_named() -> bool:
            step()
            return "s" in named or not keeps

        waits.until(is_known, what="an answer other than 'not yet'")
        self.shut(decode)
        if not named:
            waits.until(is_named, what="a step that names s, whose blocks are kept")
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

    @law("CONN-5", "CONN-4", needs="background")
    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    @pytest.mark.parametrize("is_heard", [True, False])
    def test_a_request_that_ends_while_it_loads_is_named_once_as_received(
        self, num_steps: int, is_heard: bool
    ) -> None:
        load = self.loading(background=True)
        decode, blocks = load.engine, load.blocks
        reports: list[Any] = []
        for _ in range(num_steps):
            reports.append(self.run(decode.execute, decode.plan([])))
            if is_heard:
                decode.hear(reports[-1])
        received = any(report.finished_recving for report in reports)
        keeps, _ = decode.finish(load.prompt, blocks, RequestEnd.ABORTED)
        if not keeps:  # they are free: nothing may write into them any more
            decode.cache.free(blocks)
        for report in () if is_heard else reports:
            decode.hear(report)

        def is_done() -> bool:
            reports.append(self.run(decode.step, []))
            named = any("a" in report.finished_recving for report in reports)
            return len(reports) >= num_steps + 5 and (named or not keeps)

        waits.until(is_done, what="a step that names the request, whose blocks are kept")
        named = [name for report in reports for name in report.finished_recving]
        assert not any(report.finished_sending for report in reports), "it is named as sent, and was loading"
        assert named.count("a") == 1 if keeps or received else named.count("a") <= 1, f"named are {named}"
        if not keeps:
            written = decode.cache.written(blocks)
            assert not written, f"blocks {sorted(written)} were written after they were said to be free"

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
