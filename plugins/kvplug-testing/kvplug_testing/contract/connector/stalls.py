"""A peer that lives, and from which nothing comes: it holds up no step (law CONN-9)."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest

from kvplug.engine import RequestEnd
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.stats import failed
from kvplug_testing.contract.connector.suite import ConnectorSuite, Promise
from kvplug_testing.engine import request_of

STALL_S = 2.0
"""The stall timeout of the connectors."""
LEAST_STEPS = 40
"""An engine that is held up for 50 ms a step makes no more in this time."""


class Stalls(ConnectorSuite):
    """One load, held up in its pipe, beside a request that computes."""

    @law("CONN-9", "CONN-3", "CONN-4", needs="background")
    def test_a_background_load_that_is_held_up_holds_up_no_step(self) -> None:
        self._is_held_up(background=True)

    @law("CONN-9", "CONN-3", "CONN-4", needs="stall_limit")
    def test_a_step_waits_for_a_load_that_is_held_up_for_the_stall_timeout_at_most(self) -> None:
        self._is_held_up(background=False)

    @law("CONN-9", needs="background")
    def test_an_engine_that_lets_every_load_be_waited_for_gets_them_in_the_background(self) -> None:
        load = self.loading(consumer={"loads_in_background": True})
        assert load.is_async, "the engine lets requests wait for their loads, and its steps are to wait too"

    def _is_held_up(self, *, background: bool) -> None:
        impatient: dict[str, Any] = {"num_blocks": 256}
        if not self.stall_limit:
            tables = {name: dict(table) for name, table in self.config.get("options", {}).items()}
            tables[self.connector] = {**tables.get(self.connector, {}), self.stall_option: STALL_S}
            impatient["config"] = {"options": tables}
        load = self.loading(background=background, consumer=impatient)
        with self.holding_up() as is_held:
            self._fails_in_time(load)
            if not is_held.is_set():
                pytest.skip(f"no load of {self.called} is held up in a pipe (override holding_up)")
        self._is_written_no_more(load)

    def _fails_in_time(self, load: Promise) -> None:
        """Run steps until the load has failed: the one that needs it, or those of another request."""
        decode, limit = load.engine, self.timeout_s + waits.patience_s
        began = time.monotonic()
        reports: list[Any] = []
        if not load.is_async:
            reports.append(self.run(decode.step, [load.work], within=limit))
        else:
            other = request_of("other", range(5000, 5040))
            theirs = decode.admit(other)

            def is_named() -> bool:
                reports.append(self.run(decode.step, [(other, theirs, 0, 40)], within=limit))
                return load.prompt.request_id in reports[-1].finished_recving

            waits.until(is_named, limit, what="a step that names the request whose load is held up")
        took = time.monotonic() - began
        invalid = load.check_reported(*reports)
        assert not load.is_async or not invalid or len(reports) >= LEAST_STEPS, (
            f"the engine made {len(reports)} steps in {took:.1f} s: they have waited for the load"
        )
        assert self.stall_limit or took < self.timeout_s / 2, (
            f"the load was reported after {took:.1f} s; its {self.stall_option} is {STALL_S}"
        )
        figures = self.run(decode.figures)
        assert failed(figures, "load") == bool(invalid), f"one load has failed, and counted are {figures}"

    def _is_written_no_more(self, load: Promise) -> None:
        """The peer goes on. The blocks are free by now, and what comes late is not for them."""
        decode, prompt = load.engine, load.prompt
        keeps, _ = decode.finish(prompt, load.blocks, RequestEnd.ABORTED)
        assert not keeps, "its load was reported, and its blocks are kept"
        decode.cache.free(load.blocks)
        self.until_promised(decode, prompt)
        again = attrs.evolve(prompt, request_id="again")
        assert not self.run_load(self.promised(decode, again)), "the peer goes on, and its KV does not come"
        written = decode.cache.written(load.blocks)
        assert not written, f"blocks {sorted(written)} were written after their load was reported as failed"
