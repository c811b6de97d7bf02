"""Loads that fail: reported in the same step, never used, never saved (laws CONN-3 and CONN-6)."""

from __future__ import annotations

import attrs
import pytest

from kvplug.engine import Request, RequestEnd
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import ConnectorSuite
from kvplug_testing.engine import CallOrder, FakeEngine, request_of
from kvplug_testing.waits import Call

_NEEDING = pytest.mark.parametrize("drafts", [False, True], ids=["usual", "drafting"])


class Failures(ConnectorSuite):
    """One load at a time, with both orders of the calls at the end of a step."""

    def _is_reported(self, decode: FakeEngine, how: str, drafts: bool) -> None:
        """Make the load of this engine's first prompt fail, and check that it is reported."""
        prompt = request_of("a", range(100), params=self._params)
        blocks, found, _ = self.promised(decode, prompt)
        with self.injecting_fault(how):
            scheduled = [(prompt, blocks, found, 100 - found)]
            report = Call(lambda: decode.step(scheduled, order=CallOrder(drafts=drafts))).result()
        self.skip_unless_injected()
        wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, found)
        unsaid = sorted(wrong - report.invalid_block_ids)
        assert not unsaid, f"blocks {unsaid} have wrong KV after the step, which its report does not say"
        assert report.invalid_block_ids, "a load failed, and nothing was reported"
        assert report.invalid_block_ids <= set(blocks), "blocks of others were reported"
        late = Call(lambda: decode.step([])).result()
        assert not late.invalid_block_ids, "a failed load is reported a second time, or a step late"
        Call(lambda: decode.step([(prompt, blocks, 0, 100)])).result()
        assert decode.is_right(prompt.token_ids, blocks, 100), "what was computed again was overwritten"

    _params: dict[str, object]

    @law("CONN-3")
    @_NEEDING
    def test_a_load_that_fails_is_in_the_report_of_its_step(self, drafts: bool) -> None:
        prefill, decode = self.pair()
        self._params = self.stored(prefill, range(100))
        self._is_reported(decode, "fail", drafts)

    @law("CONN-3")
    @_NEEDING
    def test_corrupted_kv_is_in_the_report_of_its_step(self, drafts: bool) -> None:
        prefill, decode = self.pair()
        self._params = self.stored(prefill, range(100))
        self._is_reported(decode, "corrupt", drafts)

    @law("CONN-3")
    def test_after_a_load_that_failed_the_next_one_succeeds(self) -> None:
        prefill, decode = self.pair()
        self._params = self.stored(prefill, range(100))
        self._is_reported(decode, "fail", drafts=False)
        prompt = request_of("b", range(100), params=self._params)
        blocks, found, report = Call(lambda: decode.load(prompt)).result()
        assert found and not report.invalid_block_ids, "one failure has ended all loads"
        assert decode.is_right(prompt.token_ids, blocks, 100), "the KV is wrong"

    @law("CONN-3", needs="background")
    def test_a_background_load_that_fails_is_reported_when_it_is_named(self) -> None:
        prefill, decode = self.pair(background=True)
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, found, is_async = self.promised(decode, prompt)
        assert is_async, "it was told to load in the background"
        with self.injecting_fault():
            reports = self.run_until_named(decode, "a")
        self.skip_unless_injected()
        invalid = frozenset().union(*(report.invalid_block_ids for report in reports))
        unsaid = sorted(decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, found) - invalid)
        assert not unsaid, f"a is named as received, and its blocks {unsaid} are wrong and not reported"
        assert invalid, "a load failed, and nothing was reported"
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
        Call(lambda: decode.step([(prompt, blocks, 0, 100)])).result()
        assert decode.is_right(prompt.token_ids, blocks, 100), "what was computed again was overwritten"

    @law("CONN-3")
    def test_what_went_between_promise_and_load_is_reported(self) -> None:
        prefill, decode = self.pair()
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, found, _ = self.promised(decode, prompt)
        self.shut(prefill)
        report = Call(lambda: decode.step([(prompt, blocks, found, 100 - found)])).result()
        wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, found)
        assert wrong <= report.invalid_block_ids, "its peer is gone, and what did not come is not reported"

    @law("CONN-6", needs="own_faults")
    @_NEEDING
    def test_a_step_that_was_planned_before_a_load_failed_stores_nothing_wrong(self, drafts: bool) -> None:
        engine, order = self.both(), CallOrder(drafts=drafts)
        self.stored(engine, range(100))
        prompt = request_of("a", range(150))
        blocks, found, _ = self.promised(engine, prompt)
        sharing, theirs = self._shares(engine, prompt, blocks, found)
        first = engine.plan([(prompt, blocks, found, 24)])
        second = engine.plan([(prompt, blocks, found + 24, 126 - found), (sharing, theirs, found, 24)])
        with self.injecting_fault():
            reports = [Call(lambda: engine.execute(first, order=order)).result()]
            # The shorter request has all its tokens, so it ends before its engine sees the report.
            engine.finish(sharing, theirs)
            third = engine.plan([])
            reports += [self.run(engine.execute, step, order=order) for step in (second, third)]
        assert reports[0].invalid_block_ids, "a load failed, and nothing was reported"
        for report in reports:
            engine.hear(report)
        engine.finish(prompt, blocks, RequestEnd.FAILED)
        Call(engine.settle).result()
        self._assert_nothing_wrong_was_saved(engine, prompt, sharing)

    @law("CONN-6", needs="others_beside_it")
    @_NEEDING
    def test_what_another_connector_failed_to_load_is_not_stored(self, drafts: bool) -> None:
        engine, order, found = self.both(), CallOrder(drafts=drafts), 96
        prompt = request_of("a", range(150))
        assert Call(lambda: engine.matched(prompt)).result()[0] == 0, "tokens are promised, none are stored"
        blocks = engine.allocate(150)
        engine.scheduler.update_state_after_alloc(prompt, (blocks,), 0)  # another connector loads them
        sharing, theirs = self._shares(engine, prompt, blocks, found)
        first = engine.plan([(prompt, blocks, found, 54), (sharing, theirs, found, 24)])
        report = Call(lambda: engine.execute(first, order=order)).result()
        engine.finish(sharing, theirs)  # before its engine sees the report
        second = engine.plan([])
        late = self.run(engine.execute, second, order=order)
        engine.hear(attrs.evolve(report, invalid_block_ids=frozenset(blocks[: found // engine.block_size])))
        engine.hear(late)
        self._assert_nothing_wrong_was_saved(engine, prompt, sharing)
        Call(lambda: engine.step([(prompt, blocks, 0, 150)], order=order)).result()
        engine.finish(prompt, blocks)
        Call(engine.settle).result()
        self._assert_nothing_wrong_was_saved(engine, prompt, sharing)

    def _shares(
        self, engine: FakeEngine, prompt: Request, blocks: tuple[int, ...], num_shared: int
    ) -> tuple[Request, tuple[int, ...]]:
        """Another request that begins with blocks of this one, which are being loaded: the engine has a
        prefix cache.
        """
        sharing = request_of("sharing", [*prompt.token_ids[:num_shared], *range(7000, 7024)])
        theirs = (*blocks[: num_shared // engine.block_size], *engine.allocate(24))
        Call(lambda: engine.matched(sharing, num_shared)).result()
        engine.scheduler.update_state_after_alloc(sharing, (theirs,), 0)
        return sharing, theirs

    def _assert_nothing_wrong_was_saved(self, engine: FakeEngine, *prompts: Request) -> None:
        for prompt in prompts:
            tokens = prompt.token_ids
            again = request_of(f"{prompt.request_id} {engine.step_number}", tokens)
            found, is_async = self.run(engine.matched, again)
            loaded = engine.allocate(len(tokens))
            engine.scheduler.update_state_after_alloc(again, (loaded,), found)
            if is_async:
                reports = self.run_until_named(engine, again.request_id)
            else:
                reports = [self.run(engine.step, [(again, loaded, found, len(tokens) - found)])]
            invalid = frozenset().union(*(report.invalid_block_ids for report in reports))
            wrong = engine.cache.wrong_blocks(tokens, loaded, 0, found) - invalid
            assert not wrong, (
                f"KV that was computed from a failed load was saved: {len(wrong)} blocks of"
                f" {prompt.request_id}"
            )
            engine.finish(again, loaded, RequestEnd.ABORTED)
