"""Loads that fail: reported in the same step, never used, never saved (laws CONN-3 and CONN-6)."""

from __future__ import annotations

import attrs
import pytest

from kvplug.engine import Request, RequestEnd
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import ConnectorSuite, Promise
from kvplug_testing.engine import CallOrder, FakeEngine, request_of

_either_order = pytest.mark.parametrize("drafts", [False, True], ids=["usual", "drafting"])


class Failures(ConnectorSuite):
    """One load at a time, with both orders of the calls at the end of a step."""

    @law("CONN-3")
    @_either_order
    @pytest.mark.parametrize("how", ["fail", "corrupt"])
    def test_a_load_that_fails_is_in_the_report_of_its_step_and_the_next_one_succeeds(
        self, how: str, drafts: bool
    ) -> None:
        load = self.loading()
        with self.injecting_fault(how):
            report = self.run(load.engine.step, [load.work], order=CallOrder(drafts=drafts))
        self.skip_unless_injected()
        assert load.check_reported(report), "a load failed, and nothing was reported"
        late = self.run(load.engine.step, [])
        assert not late.invalid_block_ids, "a failed load is reported a second time, or a step late"
        load.check_computes_again()
        again = attrs.evolve(load.prompt, request_id="b")
        self.check_loads(load.engine, again, "one failure has ended all loads")

    @law("CONN-6", needs="own_faults")
    @_either_order
    def test_a_step_that_was_planned_before_a_load_failed_stores_nothing_wrong(self, drafts: bool) -> None:
        engine, order = self.both(), CallOrder(drafts=drafts)
        self.stored(engine)
        load = self.promised(engine, request_of("a", range(150)))
        prompt, blocks, found = load.prompt, load.blocks, load.found
        sharing, theirs = self._shares(load)
        first = engine.plan([(prompt, blocks, found, 24)])
        second = engine.plan([(prompt, blocks, found + 24, 126 - found), (sharing, theirs, found, 24)])
        with self.injecting_fault():
            reports = [self.run(engine.execute, first, order=order)]
            # The shorter request has all its tokens, so it ends before its engine sees the report.
            engine.finish(sharing, theirs)
            third = engine.plan([])
            reports += [self.run(engine.execute, step, order=order) for step in (second, third)]
        assert reports[0].invalid_block_ids, "a load failed, and nothing was reported"
        for report in reports:
            engine.hear(report)
        engine.finish(prompt, blocks, RequestEnd.FAILED)
        self.run(engine.settle)
        self._check_nothing_wrong_was_saved(engine, prompt, sharing)

    @law("CONN-6", needs="others_beside_it")
    @_either_order
    def test_what_another_connector_failed_to_load_is_not_stored(self, drafts: bool) -> None:
        engine, order, found = self.both(), CallOrder(drafts=drafts), 96
        prompt = request_of("a", range(150))
        self.run(engine.matched, prompt)
        blocks = engine.allocate(150)
        engine.scheduler.update_state_after_alloc(prompt, (blocks,), 0)  # another connector loads them
        sharing, theirs = self._shares(Promise(engine, prompt, blocks, found, is_async=False))
        first = engine.plan([(prompt, blocks, found, 54), (sharing, theirs, found, 24)])
        report = self.run(engine.execute, first, order=order)
        engine.finish(sharing, theirs)  # before its engine sees the report
        late = self.run(engine.execute, engine.plan([]), order=order)
        engine.hear(attrs.evolve(report, invalid_block_ids=frozenset(blocks[: found // engine.block_size])))
        engine.hear(late)
        self._check_nothing_wrong_was_saved(engine, prompt, sharing)

    def _shares(self, load: Promise) -> tuple[Request, tuple[int, ...]]:
        """Another request that begins with blocks of this one, which are being loaded: the engine has a
        prefix cache.
        """
        engine, num_shared = load.engine, load.found
        sharing = request_of("sharing", [*load.prompt.token_ids[:num_shared], *range(7000, 7024)])
        theirs = (*load.blocks[: num_shared // engine.block_size], *engine.allocate(24))
        self.run(engine.matched, sharing, num_shared)
        engine.scheduler.update_state_after_alloc(sharing, (theirs,), 0)
        return sharing, theirs

    def _check_nothing_wrong_was_saved(self, engine: FakeEngine, *prompts: Request) -> None:
        for prompt in prompts:
            again = attrs.evolve(prompt, request_id=f"{prompt.request_id} {engine.step_number}")
            load = self.admitted(engine, again)
            self.run_load(load)
            engine.finish(again, load.blocks, RequestEnd.ABORTED)
