"""Blocks in use, and the requests that are named as sent or received (laws CONN-4 and CONN-5)."""

from __future__ import annotations

from functools import partial

import attrs
import pytest

from kvplug.engine import RequestEnd
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite, Promise
from kvplug_testing.engine import request_of
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

    @law("CONN-5", "CONN-4", needs="background")
    @pytest.mark.parametrize("num_steps", [0, 1])
    def test_a_request_that_ends_while_it_loads_is_named_once_as_received(self, num_steps: int) -> None:
        load = self.loading(background=True)
        engine = load.engine
        reports = [self.run(engine.step, []) for _ in range(num_steps)]
        keeps, _ = engine.finish(load.prompt, load.blocks, RequestEnd.ABORTED)
        if keeps:
            reports += self.run_until_named(engine, "a")
        else:  # nothing may write into them any more
            engine.cache.free(load.blocks)
        reports += [self.run(engine.step, []) for _ in range(5)]
        written = set() if keeps else engine.cache.written(load.blocks)
        assert not written, f"blocks {sorted(written)} were written after they were reported as free"
        named = [name for report in reports for name in report.finished_recving]
        assert named == ["a"] or not (keeps or named), f"named as received are {named}"
        assert not any(report.finished_sending for report in reports), "it is named as sent, and was loading"

    @law("CONN-4", "CONN-5")
    @pytest.mark.parametrize("when", ["unplanned", "failed", "loading"])
    def test_blocks_of_the_preempted_are_let_alone(self, when: str) -> None:
        """Of a load that no step knows yet, of one that has failed, and of one in the background."""
        self.skip_unless_possible(when == "loading")
        load = self.loading(background=when == "loading")
        engine, prompt = load.engine, load.prompt
        steps = [] if when == "unplanned" else [engine.plan([] if load.is_async else [load.work])]
        last = engine.plan([], preempted=_PREEMPTED)
        with self.injecting_fault("fail" if when == "failed" else ""):
            before = [self.run(engine.execute, step) for step in steps]
        if when == "failed":
            self.skip_unless_injected()
        self.run(engine.worker.handle_preemptions, _PREEMPTED)
        engine.cache.free(load.blocks)  # as soon as the worker side has the news
        after = [self.run(engine.execute, attrs.evolve(last, preempted=frozenset()))]
        for report in before + after:
            engine.hear(report)
        after += [self.run(engine.step, []) for _ in range(5)]
        written = sorted(engine.cache.written(load.blocks))
        assert not written, f"blocks {written} were written after the request that had them was preempted"
        received = [name for report in before + after for name in report.finished_recving]
        assert received in ([], ["a"] * load.is_async), f"named as received are {received}"
        assert not any(report.finished_sending for report in after), "a was preempted, and is named as sent"
        assert load.is_async or not any(report.invalid_block_ids for report in after), (
            "blocks are reported, which a had before it was preempted"
        )
        if when == "unplanned":
            again = attrs.evolve(prompt, generation=1)
            found, _ = self.run(engine.ask, again)
            blocks = engine.allocate(100)
            engine.scheduler.update_state_after_alloc(again, (blocks,), found)
            late = Promise(engine, again, blocks, found, is_async=False)
            assert found and not self.run_load(late), "it comes again, and its load fails"
