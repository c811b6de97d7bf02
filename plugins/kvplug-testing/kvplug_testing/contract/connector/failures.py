"""Loads that fail or stall: reported in time, never used, never saved (laws CONN-3, CONN-6 and CONN-9)."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest

from kvplug.engine import RequestEnd
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, STALL_OPTION, ConnectorSuite, Promise, failed
from kvplug_testing.engine import CallOrder, request_of

STALL_S = 2.0
"""The stall timeout of the connectors."""
LEAST_STEPS = 40
"""An engine that is held up for 50 ms a step makes no more in this time."""


class Failures(ConnectorSuite):
    """Loads that fail or stall where the random schedules do not come."""

    @law("CONN-6")
    @pytest.mark.parametrize("drafts", [False, True], ids=["usual", "drafting"])
    @pytest.mark.parametrize("is_own", [True, False], ids=["own", "of-another-connector"])
    def test_what_failed_to_load_is_not_stored_by_steps_in_flight(self, is_own: bool, drafts: bool) -> None:
        if reason := self.own_faults if is_own else self.others_beside_it:
            pytest.skip(reason)
        engine, order, num_loaded = self.both(), CallOrder(drafts=drafts), 96
        if is_own:
            self.stored(engine)
        # Some of its tokens are generated: a connector may know whole prompts only.
        prompt = attrs.evolve(request_of("a", range(150)), num_prompt_tokens=len(PROMPT))
        load = self.admitted(engine, prompt)
        assert load.found == num_loaded * is_own
        # The engine has a prefix cache: another request begins with the blocks that are loaded.
        sharing = request_of("sharing", [*prompt.token_ids[:num_loaded], *range(7000, 7024)])
        shared = load.blocks[: num_loaded // engine.block_size]
        theirs = (*shared, *engine.allocate(24))
        self.run(engine.matched, sharing, num_loaded)
        engine.scheduler.update_state_after_alloc(sharing, (theirs,), 0)
        first = engine.plan([(prompt, load.blocks, num_loaded, 24), (sharing, theirs, num_loaded, 24)])
        second = engine.plan([(prompt, load.blocks, num_loaded + 24, 30)])
        with self.injecting_fault("fail" if is_own else ""):
            reports = [self.run(engine.execute, first, order=order)]
            # The shorter request has all its tokens, so it ends before its engine sees the report.
            engine.finish(sharing, theirs)
            reports += [self.run(engine.execute, step, order=order) for step in (second, engine.plan([]))]
        if is_own:
            assert reports[0].invalid_block_ids, "a load failed, and nothing was reported"
        else:
            reports[0] = attrs.evolve(reports[0], invalid_block_ids=frozenset(shared))
        for report in reports:
            engine.hear(report)
        engine.finish(prompt, load.blocks, RequestEnd.FAILED)
        self.run(engine.settle)
        for each in (prompt, sharing):  # nothing wrong was saved
            load = self.admitted(engine, attrs.evolve(each, request_id=f"{each.request_id} again"))
            self.run_load(load)
            engine.finish(load.prompt, load.blocks, RequestEnd.ABORTED)

    # -- a peer that lives, and from which nothing comes ---------------------------------------------

    @law("CONN-9", "CONN-3", "CONN-4")
    @pytest.mark.parametrize("background", [True, False], ids=["background", ""])
    def test_a_load_that_is_held_up_holds_up_no_step_and_fails_in_time(self, background: bool) -> None:
        """One load, beside a request that computes if the load is in the background."""
        self.skip_unless_possible(background)
        if not background and self.stall_limit:
            pytest.skip(self.stall_limit)
        impatient: dict[str, Any] = {"num_blocks": 256}
        if not self.stall_limit:
            tables = {name: dict(table) for name, table in self.config.get("options", {}).items()}
            tables[self.transport] = {**tables.get(self.transport, {}), STALL_OPTION: STALL_S}
            impatient["config"] = {"options": tables}
        load = self.loading(background=background, consumer=impatient)
        with self.holding_up() as is_held:
            self._fails_in_time(load)
            if not is_held.is_set():
                pytest.skip(f"no load of {self.called} is held up in a pipe (override holding_up)")
        self._is_written_no_more(load)

    @law("CONN-9", needs="background")
    def test_an_engine_that_lets_every_load_be_waited_for_gets_them_in_the_background(self) -> None:
        load = self.loading(consumer={"loads_in_background": True})
        assert load.is_async, "the engine lets requests wait for their loads, and its steps are to wait too"

    def _fails_in_time(self, load: Promise) -> None:
        """Run steps until the load has failed: the one that needs it, or those of another request."""
        decode = load.engine
        began = time.monotonic()
        if load.is_async:
            other = request_of("other", range(5000, 5040))
            work = [(other, decode.admit(other), 0, 40)]
            reports = self.run_until_named(decode, load.prompt.request_id, work)
        else:
            reports = [self.run(decode.step, [load.work], within=self.timeout_s + waits.patience_s)]
        took = time.monotonic() - began
        invalid = load.check_reported(*reports)
        assert not load.is_async or not invalid or len(reports) >= LEAST_STEPS, (
            f"the engine made {len(reports)} steps in {took:.1f} s: they have waited for the load"
        )
        assert self.stall_limit or took < self.timeout_s / 2, (
            f"the load was reported after {took:.1f} s; its {STALL_OPTION} is {STALL_S}"
        )
        figures = self.run(decode.figures)
        assert failed(figures, "load") == bool(invalid), f"one load has failed, and counted are {figures}"

    def _is_written_no_more(self, load: Promise) -> None:
        """The peer goes on. The blocks are free by now, and what comes late is not for them."""
        decode, prompt = load.engine, load.prompt
        keeps, _ = decode.finish(prompt, load.blocks, RequestEnd.ABORTED)
        assert not keeps, "its load was reported, and its blocks are kept"
        decode.cache.free(load.blocks)
        again = self.renewed(prompt, "again")
        self.until_promised(decode, again)
        assert not self.run_load(self.promised(decode, again)), "the peer goes on, and its KV does not come"
        written = decode.cache.written(load.blocks)
        assert not written, f"blocks {sorted(written)} were written after their load was reported as failed"
