"""Blocks in use, and who is named (laws CONN-4 and CONN-5)."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.connector.values import RequestEnd
from kvplug.testing.contract import base
from kvplug.testing.contract.base import Call, law
from kvplug.testing.contract.connector.suite import ConnectorSuite
from kvplug.testing.engine import CallOrder, EngineDouble, request_of

_ORDERS = [CallOrder(), CallOrder(loads_after_forward=True), CallOrder(drafts=True)]
_any_order = pytest.mark.parametrize("order", _ORDERS, ids=["usual", "loads-late", "drafting"])


class Lending(ConnectorSuite):
    """An engine that gives blocks to the next one at the first moment it may."""

    @law("CONN-4")
    @pytest.mark.parametrize("num_ahead", [0, 1, 3])
    def test_blocks_are_another_requests_as_soon_as_they_are_free(self, num_ahead: int) -> None:
        """The producer has room for one prompt; each gets the blocks of the one before."""
        prefill, decode = self.pair(producer={"num_blocks": 7}, consumer={"num_blocks": 64})
        params = []
        for number in range(4):
            prompt = request_of(f"s{number}", range(1000 * number, 1000 * number + 100))
            blocks = prefill.allocate(100)
            prefill.scheduler.on_new_request(prompt)
            prefill.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
            self.run(prefill.step, [(prompt, blocks, 0, 100)])
            keeps, given = prefill.finish(prompt, blocks)
            params.append(given)
            if keeps:
                self._wait_for(prefill, prompt.request_id)
            elif num_ahead:
                for _ in range(num_ahead):
                    Call(lambda: prefill.step([])).result()
            prefill.cache.free(blocks)
            prefill.free_blocks = [*blocks, *prefill.free_blocks]
        for number in range(4):
            tokens = range(1000 * number, 1000 * number + 100)
            prompt = request_of(f"r{number}", tokens, params=params[number])
            blocks, found, report = self.run(decode.load, prompt)
            wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, 100) - report.invalid_block_ids
            assert not wrong, (
                f"{found} tokens of prompt {number} of 4 came, and {len(wrong)} blocks are another's: they"
                " were read after they were said to be free"
            )

    def _wait_for(self, engine: EngineDouble, name: str) -> None:
        """Steps until it is named as sent, once."""
        named: list[str] = []

        def is_named() -> bool:
            report = Call(lambda: engine.step([])).result()
            named.extend(sorted(report.finished_sending))
            assert not report.finished_recving, "nothing was loaded, and something is named as received"
            return name in named

        base.until(is_named, what=f"a step that names {name}, whose blocks are kept")
        for _ in range(3):
            named.extend(sorted(Call(lambda: engine.step([])).result().finished_sending))
        assert named == [name], f"named as sent are {named}"

    @law("CONN-5")
    def test_a_request_whose_blocks_are_kept_is_named_once(self) -> None:
        prefill = self.engine("producer")
        prompt = request_of("a", range(100))
        blocks = prefill.allocate(100)
        prefill.scheduler.on_new_request(prompt)
        prefill.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
        Call(lambda: prefill.step([(prompt, blocks, 0, 100)])).result()
        keeps, _ = prefill.finish(prompt, blocks)
        if keeps:
            self._wait_for(prefill, "a")
        else:
            reports = [Call(lambda: prefill.step([])).result() for _ in range(5)]
            named = [name for report in reports for name in report.finished_sending]
            assert not named, f"{named} is named as sent, though its blocks were not kept"

    @law("CONN-5", "CONN-4", needs="background")
    @_any_order
    def test_a_background_load_is_named_once_when_it_is_there(self, order: CallOrder) -> None:
        prefill, decode = self.pair(background=True)
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, found, is_async = self.promised(decode, prompt)
        assert is_async, "it was told to load in the background"
        other, theirs = request_of("other", range(5000, 5040)), decode.allocate(40)
        decode.scheduler.on_new_request(other)
        decode.scheduler.update_state_after_alloc(other, (theirs,), 0)
        named: list[str] = []

        def is_named() -> bool:  # beside a request that computes, so that there is a forward pass
            report = Call(lambda: decode.step([(other, theirs, 0, 40)], order=order)).result()
            named.extend(sorted(report.finished_recving))
            return bool(named)

        base.until(is_named, what="a step that names the request that loads")
        wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, found)
        assert not wrong, f"it is named as received, and its blocks {sorted(wrong)} are wrong"
        for _ in range(4):
            named += sorted(Call(lambda: decode.step([], order=order)).result().finished_recving)
        assert named == ["a"], f"named as received are {named}"

    @law("CONN-5", "CONN-4", needs="background")
    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    @pytest.mark.parametrize("is_heard", [True, False])
    def test_a_request_that_ends_while_it_loads_is_named_once_as_received(
        self, num_steps: int, is_heard: bool
    ) -> None:
        prefill, decode = self.pair(background=True)
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, _, _ = self.promised(decode, prompt)
        reports: list[Any] = []
        for _ in range(num_steps):
            reports.append(Call(lambda: decode.execute(decode.plan([]))).result())
            if is_heard:
                decode.hear(reports[-1])
        received = [name for report in reports for name in report.finished_recving]
        keeps, _ = decode.finish(prompt, blocks, RequestEnd.ABORTED)
        if not keeps:  # they are free: nothing may be written into them any more
            decode.cache.free(blocks)
        for report in () if is_heard else reports:
            decode.hear(report)
        late: list[Any] = []

        def is_done() -> bool:
            late.append(Call(lambda: decode.step([])).result())
            named = any("a" in report.finished_recving for report in (*reports, *late))
            return len(late) >= 5 and (named or not keeps)

        base.until(is_done, what="a step that names the request, whose blocks are kept")
        named = [name for report in (*reports, *late) for name in report.finished_recving]
        sent = [name for report in (*reports, *late) for name in report.finished_sending]
        assert not sent, f"{sent} is named as sent; it ended while it was loading"
        assert named.count("a") == 1 if keeps or received else named.count("a") <= 1, f"named are {named}"
        if not keeps:
            written = decode.cache.written(blocks)
            assert not written, f"blocks {sorted(written)} were written after they were said to be free"
