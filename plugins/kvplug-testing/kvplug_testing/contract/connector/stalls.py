"""A peer that lives, and from which nothing comes: it holds up no step (law CONN-9)."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from kvplug.engine import RequestEnd
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.endings import produce
from kvplug_testing.contract.connector.stats import failed
from kvplug_testing.contract.connector.suite import ConnectorSuite
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call

STALL_S = 2.0
"""The stall timeout of the connectors."""
LEAST_STEPS = 40
"""An engine that is held up for 50 ms a step makes no more in this time."""


class Stalls(ConnectorSuite):
    """One load, held up in its pipe or by a peer that is stopped, beside a request that computes."""

    @law("CONN-9", "CONN-3", "CONN-4", needs="background")
    def test_a_background_load_that_is_held_up_holds_up_no_step(self) -> None:
        prefill, decode = self._pair(background=True)
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, found, _ = self.promised(decode, prompt)
        with self.holding_up() as is_held:
            self._other_steps_go_on(decode, prompt, blocks, found)
            self._skip_unless(is_held.is_set())
        self._is_written_no_more(decode, prompt, blocks)

    @law("CONN-9", "CONN-3", "CONN-4", needs="stall_limit")
    def test_a_step_waits_for_a_load_that_is_held_up_for_the_stall_timeout_at_most(self) -> None:
        prefill, decode = self._pair()
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, found, _ = self.promised(decode, prompt)
        with self.holding_up() as is_held:
            self._its_step_ends(decode, prompt, blocks, found)
            self._skip_unless(is_held.is_set())
        self._is_written_no_more(decode, prompt, blocks)

    @law("CONN-9", "ALL-3", needs="background_and_other_processes", level="long")
    def test_a_background_load_from_a_peer_that_is_stopped_holds_up_no_step(self) -> None:
        child, params = self._producing()
        decode = self.engine("consumer", background=True, **self._impatient())
        self.meet(decode)
        prompt = request_of("a", range(100), params=params)
        blocks, found, _ = self.promised(decode, prompt)
        child.stop()
        self._other_steps_go_on(decode, prompt, blocks, found)
        child.cont()
        self._is_written_no_more(decode, prompt, blocks)

    @law("CONN-9", "ALL-3", needs="stall_limit_and_other_processes", level="long")
    def test_a_step_waits_for_a_peer_that_is_stopped_for_the_stall_timeout_at_most(self) -> None:
        child, params = self._producing()
        decode = self.engine("consumer", **self._impatient())
        self.meet(decode)
        prompt = request_of("a", range(100), params=params)
        blocks, found, _ = self.promised(decode, prompt)
        child.stop()
        self._its_step_ends(decode, prompt, blocks, found)
        child.cont()
        self._is_written_no_more(decode, prompt, blocks)

    @law("CONN-9", needs="background")
    def test_an_engine_that_lets_every_load_be_waited_for_gets_them_in_the_background(self) -> None:
        prefill, decode = self.pair(consumer={"loads_in_background": True})
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, found, is_async = self.promised(decode, prompt)
        assert is_async, "the engine lets requests wait for their loads, and its steps are to wait as well"
        reports = self.run_until_named(decode, "a")
        invalid = frozenset().union(*(report.invalid_block_ids for report in reports))
        wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, found)
        assert not wrong | invalid, f"blocks {sorted(wrong)} are wrong, and {sorted(invalid)} are reported"

    # -- engines -------------------------------------------------------------------------------

    def _impatient(self) -> dict[str, Any]:
        """Arguments of an engine that waits for :data:`STALL_S`, with blocks for all requests of a test."""
        given: dict[str, Any] = {"num_blocks": 256, "seed": 2}
        if not self.stall_limit:
            tables = {name: dict(table) for name, table in self.config.get("options", {}).items()}
            tables[self.connector] = {**tables.get(self.connector, {}), self.stall_option: STALL_S}
            given["config"] = {"options": tables}
        return given

    def _pair(self, *, background: bool = False) -> tuple[FakeEngine, FakeEngine]:
        return self.pair(background=background, consumer=self._impatient())

    def _producing(self) -> tuple[Any, Any]:
        """A process with an engine that has stored a prompt, and the parameters for loading it."""
        config = self.config_of("producer")  # reserves the address
        child = self.start(produce, self.suite_ref(), config.host, dict(self.config))
        return child, child.recv()

    def _skip_unless(self, is_held: bool) -> None:
        if not is_held:
            pytest.skip(f"no load of {self.called} is held up in a pipe (override holding_up)")

    # -- a load of which nothing comes ---------------------------------------------------------

    def _other_steps_go_on(
        self, decode: FakeEngine, prompt: Any, blocks: tuple[int, ...], found: int
    ) -> None:
        """Run steps with another request, until one names the load."""
        other = request_of("other", range(5000, 5040))
        theirs = decode.admit(other)
        reports: list[Any] = []
        began = time.monotonic()
        limit = self.timeout_s + waits.patience_s

        def is_named() -> bool:
            reports.append(self.run(decode.step, [(other, theirs, 0, 40)], within=limit))
            return prompt.request_id in reports[-1].finished_recving

        waits.until(is_named, limit, what="a step that names the request whose load is held up")
        took = time.monotonic() - began
        invalid = frozenset().union(*(report.invalid_block_ids for report in reports))
        if invalid:
            assert len(reports) >= LEAST_STEPS, (
                f"nothing of a load came, and the engine made {len(reports)} steps in {took:.1f} s: they have"
                " waited for it"
            )
        self._has_failed_in_time(decode, prompt, blocks, found, invalid, took)

    def _its_step_ends(self, decode: FakeEngine, prompt: Any, blocks: tuple[int, ...], found: int) -> None:
        """Run the step that the request waits for."""
        step = Call(lambda: decode.step([(prompt, blocks, found, 100 - found)]))
        invalid = step.result(self.timeout_s + waits.patience_s).invalid_block_ids
        self._has_failed_in_time(decode, prompt, blocks, found, invalid, step.took_s)

    def _has_failed_in_time(
        self,
        decode: FakeEngine,
        prompt: Any,
        blocks: tuple[int, ...],
        found: int,
        invalid: frozenset[int],
        took: float,
    ) -> None:
        wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, found)
        assert wrong <= invalid, f"blocks {sorted(wrong - invalid)} are wrong and not reported"
        assert self.stall_limit or took < self.timeout_s / 2, (
            f"nothing of a load came, and it was reported after {took:.1f} s; its {self.stall_option} is"
            f" {STALL_S}"
        )
        figures = Call(decode.figures).result()
        assert failed(figures, "load") == bool(invalid), f"one load has failed, and counted are {figures}"

    def _is_written_no_more(self, decode: FakeEngine, prompt: Any, blocks: tuple[int, ...]) -> None:
        """The peer goes on. The blocks are free by now, and what comes late is not for them."""
        keeps, _ = decode.finish(prompt, blocks, RequestEnd.ABORTED)
        assert not keeps, "its load was reported, and its blocks are kept"
        decode.cache.free(blocks)
        names = (f"again{number}" for number in itertools.count())
        loaded: list[Any] = []

        def is_loaded() -> bool:
            again = request_of(next(names), prompt.token_ids, params=prompt.params)
            found, is_async = Call(lambda: decode.matched(again)).result()
            if not found:
                decode.finish(again, (), RequestEnd.ABORTED)
                return False
            theirs = decode.allocate(100)
            decode.scheduler.update_state_after_alloc(again, (theirs,), found)
            if is_async:
                reports = self.run_until_named(decode, again.request_id)
            else:
                reports = [self.run(decode.step, [(again, theirs, found, 100 - found)])]
            loaded.append((theirs, found, frozenset().union(*(each.invalid_block_ids for each in reports))))
            return True

        waits.until(is_loaded, 2 * waits.patience_s, what="a promise of what the peer has, which goes on")
        theirs, found, invalid = loaded[0]
        assert not invalid, "the peer goes on, and what it has does not come"
        assert not decode.cache.wrong_blocks(prompt.token_ids, theirs, 0, found), "the KV is wrong"
        written = decode.cache.written(blocks)
        assert not written, f"blocks {sorted(written)} were written after their load was reported as failed"
