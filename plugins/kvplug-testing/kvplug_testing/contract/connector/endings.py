"""Shutdown at any point, and dead peers (laws ALL-1, ALL-2, ALL-4, ALL-5 and ALL-7)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvplug import KvplugError
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import ConnectorSuite
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call

_POINTS = (
    "new",
    "asked",
    "allocated",
    "planned",
    "bound",
    "loading",
    "in a layer",
    "executed",
    "heard",
    "finished",
)


class Endings(ConnectorSuite):
    """One side, both sides or the peer end while a request is in any state."""

    def _go(self, decode: FakeEngine, point: str, params: Any) -> None:
        """Take a request up to this point."""
        worker, scheduler = decode.worker, decode.scheduler
        prompt = request_of("a", range(100), params=params)
        reached = _POINTS.index(point)
        if reached < 1:
            return
        found, is_async = decode.matched(prompt)
        if reached < 2:
            return
        blocks = decode.allocate(100)
        scheduler.update_state_after_alloc(prompt, (blocks,), found)
        if reached < 3:
            return
        planned = decode.plan([] if is_async else [(prompt, blocks, found, 100 - found)])
        if reached in (4, 5, 6):
            worker.bind_connector_metadata(planned.metadata)
            if reached > 4:
                worker.start_load_kv()
            if reached > 5:
                decode.visit(0, planned)
        if reached > 6:
            report = decode.execute(planned)
            if reached > 7:
                decode.hear(report)
            if reached > 8:
                decode.finish(prompt, blocks)

    def _end(self, engine: FakeEngine, is_worker_first: bool) -> None:
        """Shut down both sides, twice each; every call must end in time."""
        sides = [engine.worker, engine.scheduler] if is_worker_first else [engine.scheduler, engine.worker]
        for side in (*sides, *sides):
            Call(side.shutdown).result()

    @law("ALL-1", "ALL-7")
    @pytest.mark.parametrize("is_worker_first", [True, False], ids=["worker-first", "scheduler-first"])
    @pytest.mark.parametrize("point", _POINTS)
    def test_it_can_be_shut_down_at_any_point(self, point: str, is_worker_first: bool) -> None:
        prefill, decode = self.pair()
        params = self.stored(prefill, range(100))
        Call(lambda: self._go(decode, point, params)).result()
        self._end(decode, is_worker_first)
        self._end(prefill, is_worker_first)

    @law("ALL-1", "ALL-7", needs="background")
    @pytest.mark.parametrize("point", ["planned", "loading", "executed", "finished"])
    def test_it_can_be_shut_down_while_it_loads_in_the_background(self, point: str) -> None:
        prefill, decode = self.pair(background=True)
        params = self.stored(prefill, range(100))
        Call(lambda: self._go(decode, point, params)).result()
        self._end(decode, is_worker_first=True)

    @law("ALL-1", "ALL-5", "ALL-7")
    @pytest.mark.parametrize("is_worker_first", [True, False], ids=["worker-first", "scheduler-first"])
    def test_a_load_that_waits_ends_when_another_thread_shuts_down(self, is_worker_first: bool) -> None:
        prefill, decode = self.pair()
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, found, _ = self.promised(decode, prompt)

        def load(is_held: threading.Event) -> Any:
            return decode.step([(prompt, blocks, found, 100 - found)]).invalid_block_ids

        invalid = self._shut_down_while_it_waits(decode, load, is_worker_first)
        if invalid is not None:
            wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, found)
            assert wrong <= invalid, "the step has ended well, and what did not come is not reported"

    @law("ALL-1", "ALL-5", "ALL-7", needs="background")
    def test_a_background_load_that_waits_ends_when_another_thread_shuts_down(self) -> None:
        prefill, decode = self.pair(background=True)
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        self.promised(decode, prompt)

        def load(is_held: threading.Event) -> None:
            while not is_held.is_set() and "a" not in decode.step([]).finished_recving:
                time.sleep(0.001)

        self._shut_down_while_it_waits(decode, load, is_worker_first=True)

    def _shut_down_while_it_waits(
        self, decode: FakeEngine, load: Callable[[threading.Event], Any], is_worker_first: bool
    ) -> Any:
        """The return value of ``load``, if any; it may also raise one of kvplug's errors."""
        with self.holding_up() as is_held:
            loading = Call(lambda: load(is_held))
            waits.until(lambda: is_held.is_set() or loading.ended, what="a load that is held up")
            if not is_held.is_set():
                loading.result()
                pytest.skip(f"no load of {self.called} is held up in a pipe (override holding_up)")
            self._end(decode, is_worker_first)
            loading.end()
        assert loading.error is None or isinstance(loading.error, KvplugError), (
            f"the load that was under way at shutdown ended in {loading.error!r}"
        )
        return loading.value

    @law("ALL-1", "ALL-7")
    def test_aproducer_can_be_shut_down_in_the_middle_of_a_prompt(self) -> None:
        prefill = self.engine("producer")
        prompt = request_of("a", range(100))
        blocks = prefill.admit(prompt)
        Call(lambda: prefill.step([(prompt, blocks, 0, 40)])).result()
        planned = prefill.plan([(prompt, blocks, 40, 60)])
        prefill.worker.bind_connector_metadata(planned.metadata)
        Call(prefill.worker.start_load_kv).result()
        Call(lambda: prefill.visit(0, planned)).result()
        self._end(prefill, is_worker_first=True)

    @law("ALL-1", "ALL-7")
    def test_what_has_been_handed_off_and_not_been_fetched_does_not_hold_up_the_end(self) -> None:
        prefill = self.engine("producer")
        prompt = request_of("a", range(100))
        blocks = prefill.admit(prompt)
        Call(lambda: prefill.step([(prompt, blocks, 0, 100)])).result()
        prefill.finish(prompt, blocks)
        self._end(prefill, is_worker_first=False)

    @law("ALL-1")
    def test_an_engine_whose_peer_never_came_can_be_shut_down(self) -> None:
        decode = self.engine("consumer")
        waiting = Call(lambda: decode.worker.wait_until_ready(waits.patience_s))
        waiting.is_blocked()
        self._end(decode, is_worker_first=True)
        waiting.end()

    @law("ALL-7", level="long", timeout_s=300)
    def test_engines_that_come_and_go_leave_nothing(self) -> None:
        for number in range(20):
            with self.scope():
                prefill, decode = self.pair()
                prompt = request_of(f"r{number}", range(100), params=self.stored(prefill, range(100)))
                self.run(decode.load, prompt)

    # -- the peer ------------------------------------------------------------------------------

    @law("ALL-2", "ALL-4", "ALL-5")
    @pytest.mark.parametrize("was_met", [True, False])
    def test_a_peer_that_is_gone_is_a_miss_or_a_reported_failure(self, was_met: bool) -> None:
        prefill, decode = self.pair()
        if not was_met:
            decode = self.engine("consumer", seed=3)
        params = self.stored(prefill, range(100))
        prompt = request_of("a", range(100), params=params)
        blocks, found, _ = self.promised(decode, prompt)
        self._end(prefill, is_worker_first=True)
        self._computes_by_itself(decode, prompt, blocks, found)
        late = request_of("b", range(100), params=params)
        blocks, found, report = Call(lambda: decode.load(late)).result()
        wrong = decode.cache.wrong_blocks(late.token_ids, blocks, 0, 100)
        assert wrong <= report.invalid_block_ids, "its peer is gone, and it loaded something"

    def _computes_by_itself(self, decode: FakeEngine, prompt: Any, blocks: Any, found: int) -> None:
        """The promised KV does not arrive. The step reports that within ``timeout_s``, and the engine
        computes it.
        """
        began = time.monotonic()
        scheduled = [(prompt, blocks, found, 100 - found)]
        report = Call(lambda: decode.step(scheduled)).result(self.timeout_s + waits.patience_s)
        took = time.monotonic() - began
        limit = self.timeout_s + waits.patience_s / 2
        assert took < limit, f"the step took {took:.1f} s, and timeout_s is {self.timeout_s}"
        wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, found)
        assert wrong <= report.invalid_block_ids, "what did not come is not reported"
        Call(lambda: decode.step([(prompt, blocks, 0, 100)])).result()
        assert decode.is_right(prompt.token_ids, blocks, 100), "what was computed again was overwritten"

    @law("ALL-2", "CONN-2")
    def test_a_peer_that_comes_back_is_found_again(self) -> None:
        prefill, decode = self.pair()
        self.stored(prefill, range(100))
        self._end(prefill, is_worker_first=True)
        prefill = self.engine("producer", seed=3)
        params = self.stored(prefill, range(2000, 2100))
        names = iter(range(1_000_000))

        def is_promised() -> bool:
            asking = request_of(f"ask{next(names)}", range(2000, 2100), params=params)
            return bool(decode.matched(asking)[0])

        Call(lambda: waits.until(is_promised, what="a promise of what the new peer has")).result(
            2 * waits.patience_s
        )
        prompt = request_of("a", range(2000, 2100), params=params)
        blocks, _, report = Call(lambda: decode.load(prompt)).result()
        assert not report.invalid_block_ids, "the peer is back, and what it has does not come"
        assert decode.is_right(prompt.token_ids, blocks, 100), "the KV is wrong"

    @law("ALL-2", "ALL-5", "ALL-7", needs="other_processes", level="long")
    @pytest.mark.parametrize("when", ["promised", "loading", "half"])
    def test_a_peer_that_is_killed_is_a_reported_failure(self, when: str) -> None:
        config = self.config_of("producer")  # reserves the address
        child = self.start(produce, self.suite_ref(), config.host, dict(self.config))
        params = child.recv()
        if when == "half":
            self.switch.before_receiving = lambda number: child.kill() if number == 2 else None
        decode = self.engine("consumer", seed=2)
        self.meet(decode)
        prompt = request_of("a", range(100), params=params)
        blocks, found, _ = self.promised(decode, prompt)
        if when == "promised":
            child.kill()
        elif when == "loading":
            planned = decode.plan([(prompt, blocks, found, 100 - found)])
            decode.worker.bind_connector_metadata(planned.metadata)
            Call(decode.worker.start_load_kv).result()
            child.kill()
            for layer in range(len(decode.layer_names)):
                self.run(decode.visit, layer, planned, within=self.timeout_s + waits.patience_s)
            Call(decode.worker.wait_for_save).result(self.timeout_s + waits.patience_s)
            report = decode.report(planned)
            decode.worker.clear_connector_metadata()
            decode.hear(report)
            wrong = decode.cache.wrong_blocks(prompt.token_ids, blocks, 0, found)
            assert wrong <= report.invalid_block_ids, "what did not come is not reported"
            return
        self._computes_by_itself(decode, prompt, blocks, found)


def produce(parent: peers.Parent, suite_ref: Any, host: str, config: Any) -> None:
    """In a child: run an engine that stores a prompt, and runs until it is killed."""
    suite = suite_from_ref(suite_ref)
    suite._host = host
    engine = FakeEngine(suite.config_of("producer"), make=suite.make_side, seed=1)
    _, params = engine.hand_off(request_of("stored", range(100)))
    parent.send(params or {})
    parent.recv(timeout=None)
