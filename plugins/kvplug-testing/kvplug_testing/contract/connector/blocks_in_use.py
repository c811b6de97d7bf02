"""Blocks in use, and the requests that are named as sent or received (laws CONN-4 and CONN-5)."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.engine import RequestEnd
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite
from kvplug_testing.engine import request_of


class BlocksInUse(ConnectorSuite):
    """An engine that reuses blocks for another request as soon as it may."""

    @law("CONN-4", "CONN-5")
    @pytest.mark.parametrize("when", ["asked", "promised"])
    def test_blocks_that_were_kept_for_a_consumer_that_is_shut_down_are_free_again(self, when: str) -> None:
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
            if found is None and when == "promised":
                step()
                return False
            if found:
                decode.scheduler.update_state_after_alloc(prompt, (decode.allocate(100),), found)
            return True

        def is_named() -> bool:
            step()
            return "s" in named

        waits.until(is_known, what="an answer other than 'not yet'")
        self.shut(decode)
        if keeps and not named:
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
