"""Blocks in use, and the requests that are named as sent or received (laws CONN-4 and CONN-5)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvplug.engine import RequestEnd
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.fault_injection import FaultInjectingPipe
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.engine import CallOrder, FakeEngine, request_of
from kvplug_testing.waits import Call

_ORDERS = [CallOrder(), CallOrder(loads_after_forward=True), CallOrder(drafts=True)]
_any_order = pytest.mark.parametrize("order", _ORDERS, ids=["usual", "loads-late", "drafting"])


class BlocksInUse(ConnectorSuite):
    """An engine that reuses blocks for another request as soon as it may."""

    @law("CONN-4")
    @pytest.mark.parametrize("num_ahead", [0, 1, 3])
    def test_blocks_are_another_requests_as_soon_as_they_are_free(self, num_ahead: int) -> None:
        """The producer has blocks for one prompt; each prompt reuses those of the previous one."""
        prefill, decode = self.pair(producer={"num_blocks": 7}, consumer={"num_blocks": 64})
        params = []
        for number in range(4):
            prompt = request_of(f"s{number}", range(1000 * number, 1000 * number + 100))
            blocks = prefill.admit(prompt)
            self.run(prefill.step, [(prompt, blocks, 0, 100)])
            keeps, given = prefill.finish(prompt, blocks)
            params.append(given)
            if keeps:
                self._wait_for(prefill, prompt.request_id)
            else:
                for _ in range(num_ahead):
                    self.run(prefill.step, [])
            self._reuse(prefill, blocks)
        for number in range(4):
            tokens = range(1000 * number, 1000 * number + 100)
            prompt = request_of(f"r{number}", tokens, params=params[number])
            blocks, found, report = self.run(decode.load, prompt)
            wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, 100) - report.invalid_block_ids
            assert not wrong, (
                f"{found} tokens of prompt {number} of 4 came, and {len(wrong)} blocks are another's: they"
                " were read after they were said to be free"
            )

    @staticmethod
    def _reuse(engine: FakeEngine, blocks: tuple[int, ...]) -> None:
        """The next request gets these blocks."""
        engine.cache.free(blocks)
        engine.free_blocks = [*blocks, *engine.free_blocks]

    def _wait_for(self, engine: FakeEngine, name: str, named: list[str] | None = None) -> None:
        """Run steps until the request is named as sent, exactly once. ``named``: the names of earlier
        steps.
        """
        named = [] if named is None else named

        def is_named() -> bool:
            if name not in named:
                self._note_sent(engine, named)
            return name in named

        waits.until(is_named, what=f"a step that names {name}, whose blocks are kept")
        for _ in range(3):
            named.extend(sorted(self.run(engine.step, []).finished_sending))
        assert named == [name], f"named as sent are {named}"

    def _note_sent(self, engine: FakeEngine, named: list[str]) -> None:
        """Run a step that loads nothing, and record its names."""
        report = self.run(engine.step, [])
        named.extend(sorted(report.finished_sending))
        assert not report.finished_recving, "nothing was loaded, and something is named as received"

    # -- a consumer that is gone ---------------------------------------------------------------

    def _finished(self, prefill: FakeEngine) -> tuple[tuple[int, ...], bool, dict[str, Any] | None]:
        """Compute a prompt. Returns its blocks, whether they are kept, and the parameters for its
        consumer.
        """
        prompt = request_of("s", PROMPT)
        blocks = prefill.admit(prompt)
        self.run(prefill.step, [(prompt, blocks, 0, 100)])
        return (blocks, *prefill.finish(prompt, blocks))

    def _are_free_again(
        self, prefill: FakeEngine, blocks: tuple[int, ...], keeps: bool, named: list[str]
    ) -> None:
        """If the blocks are kept, the prompt is named as sent. Another prompt can then use them and be
        loaded.
        """
        if keeps:
            self._wait_for(prefill, "s", named)
        self._reuse(prefill, blocks)
        params = self.stored(prefill, range(5000, 5100), "other")
        decode = self.engine("consumer", seed=3)
        self.meet(decode)
        prompt = request_of("b", range(5000, 5100), params=params)
        self.check_loads(decode, prompt, "one consumer is gone, and the next one gets nothing")

    @law("CONN-4", "CONN-5")
    @pytest.mark.parametrize("when", ["asked", "promised"])
    def test_blocks_that_were_kept_for_a_consumer_that_is_shut_down_are_free_again(self, when: str) -> None:
        prefill, decode = self.pair()
        blocks, keeps, params = self._finished(prefill)
        prompt = request_of("a", range(100), params=params)
        decode.scheduler.on_new_request(prompt)
        named: list[str] = []

        def is_known() -> bool:
            found, _ = self.run(decode.scheduler.get_num_new_matched_tokens, prompt, 0)
            if found is None and when == "promised":
                self._note_sent(prefill, named)
                return False
            if found:
                theirs = decode.allocate(100)
                decode.scheduler.update_state_after_alloc(prompt, (theirs,), found)
            return True

        waits.until(is_known, what="an answer other than 'not yet'")
        self.shut(decode)
        self._are_free_again(prefill, blocks, keeps, named)

    @law("CONN-4", "CONN-5", "ALL-2", needs="other_processes", level="long")
    @pytest.mark.parametrize("when", ["met", "promised", "loading"])
    def test_blocks_that_were_kept_for_a_consumer_that_is_killed_are_free_again(self, when: str) -> None:
        prefill = self.engine("producer", seed=1)
        child = self.start(_consume, self.suite_ref(), self._host, when)
        child.recv()
        blocks, keeps, params = self._finished(prefill)
        named: list[str] = []
        if when != "met":
            child.send(params or {})
            asking = Call(child.recv)

            def is_promised() -> bool:  # saved KV may need steps before it can be promised
                self._note_sent(prefill, named)
                return asking.ended

            waits.until(is_promised, what="a consumer that is promised what its peer has")
            asking.result()
        child.kill()
        self._are_free_again(prefill, blocks, keeps, named)

    # -- names ---------------------------------------------------------------------------------

    @law("CONN-5")
    def test_a_request_whose_blocks_are_kept_is_named_once_and_no_other(self) -> None:
        prefill = self.engine("producer")
        _, keeps, _ = self._finished(prefill)
        named: list[str] = []
        if keeps:
            self._wait_for(prefill, "s", named)
        for _ in range(5):
            self._note_sent(prefill, named)
        assert named == ["s"] * keeps, f"named as sent are {named}; the blocks are kept: {keeps}"

    @law("CONN-5", "CONN-4", needs="background")
    @_any_order
    def test_a_background_load_is_named_once_when_it_is_there(self, order: CallOrder) -> None:
        load = self.loading(background=True)
        assert load.is_async, "the option says that it loads in the background"
        decode, other = load.engine, request_of("other", range(5000, 5040))
        theirs = decode.admit(other)
        named: list[str] = []

        def is_named() -> bool:  # with a request that computes, so that there is a forward pass
            report = self.run(decode.step, [(other, theirs, 0, 40)], order=order)
            named.extend(sorted(report.finished_recving))
            return bool(named)

        waits.until(is_named, what="a step that names the request that loads")
        assert not load.wrong, f"it is named as received, and its blocks {sorted(load.wrong)} are wrong"
        for _ in range(4):
            named += sorted(self.run(decode.step, [], order=order).finished_recving)
        assert named == ["a"], f"named as received are {named}"

    @law("CONN-5", "CONN-4", needs="background")
    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    @pytest.mark.parametrize("is_heard", [True, False])
    def test_a_request_that_ends_while_it_loads_is_named_once_as_received(
        self, num_steps: int, is_heard: bool
    ) -> None:
        load = self.loading(background=True)
        decode, prompt, blocks = load.engine, load.prompt, load.blocks
        reports: list[Any] = []
        for _ in range(num_steps):
            reports.append(self.run(decode.execute, decode.plan([])))
            if is_heard:
                decode.hear(reports[-1])
        received = [name for report in reports for name in report.finished_recving]
        keeps, _ = decode.finish(prompt, blocks, RequestEnd.ABORTED)
        if not keeps:  # they are free: nothing may write into them any more
            decode.cache.free(blocks)
        for report in () if is_heard else reports:
            decode.hear(report)
        late: list[Any] = []

        def is_done() -> bool:
            late.append(self.run(decode.step, []))
            named = any("a" in report.finished_recving for report in (*reports, *late))
            return len(late) >= 5 and (named or not keeps)

        waits.until(is_done, what="a step that names the request, whose blocks are kept")
        named = [name for report in (*reports, *late) for name in report.finished_recving]
        sent = [name for report in (*reports, *late) for name in report.finished_sending]
        assert not sent, f"{sent} is named as sent; it ended while it was loading"
        assert named.count("a") == 1 if keeps or received else named.count("a") <= 1, f"named are {named}"
        if not keeps:
            written = decode.cache.written(blocks)
            assert not written, f"blocks {sorted(written)} were written after they were said to be free"


def _consume(parent: peers.Parent, suite_ref: Any, host: str, when: str) -> None:
    """In a child: run an engine that asks for a prompt, may load it, and runs until it is killed."""
    suite = suite_from_ref(suite_ref)
    suite.share_address(host)
    engine = FakeEngine(
        suite.config_of("consumer"),
        make=suite.make_side,
        wrap_pipe=lambda pipe: FaultInjectingPipe(pipe, suite.switch),
        seed=2,
    )
    engine.scheduler.wait_until_ready(waits.patience_s)
    engine.worker.wait_until_ready(waits.patience_s)
    parent.send("met")
    params, found = parent.recv(timeout=None), 0
    while not found:  # the first query may come before its peer has stored the prompt
        prompt = request_of(f"a{time.monotonic_ns()}", range(100), params=params)
        found, _ = engine.matched(prompt)
        if not found:
            engine.scheduler.request_finished(prompt, ((),), RequestEnd.ABORTED)
            time.sleep(0.01)

    def stay(*_: Any) -> None:
        parent.send(found)
        parent.recv(timeout=None)

    if when == "loading":
        suite.switch.before_receiving = stay
    blocks = engine.allocate(100)
    engine.scheduler.update_state_after_alloc(prompt, (blocks,), found)
    if when == "loading":
        engine.step([(prompt, blocks, found, 100 - found)])
    stay()
