"""Shutdown at any point, dead peers, forks and programs that leave (laws ALL-1, ALL-2 and ALL-4 to ALL-8)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import attrs
import pytest

from kvplug import ClosedError, KvplugError, TimeoutError
from kvplug.engine import Request
from kvplug_testing import peers, waits
from kvplug_testing.contract import leaving
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite, Promise
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call

_SHORT_S = 0.3
_POINTS = (
    *("new", "asked", "allocated", "planned", "bound"),
    *("loading", "in a layer", "executed", "reported", "finished"),
)


class Endings(ConnectorSuite):
    """One side, both sides or the peer end while a request is in any state."""

    def _go(self, decode: FakeEngine, prompt: Request, point: str) -> None:
        """Take a request up to this point."""
        for reached in self._going(decode, prompt):
            if reached == point:
                return

    @staticmethod
    def _going(decode: FakeEngine, prompt: Request) -> Iterator[str]:
        worker, scheduler = decode.worker, decode.scheduler
        yield "new"
        found, is_async = decode.matched(prompt)
        yield "asked"
        blocks = decode.allocate(100)
        scheduler.update_state_after_alloc(prompt, (blocks,), found)
        yield "allocated"
        planned = decode.plan([] if is_async else [(prompt, blocks, found, 100 - found)])
        yield "planned"
        worker.bind_connector_metadata(planned.metadata)
        yield "bound"
        worker.start_load_kv()
        yield "loading"
        for layer in range(len(decode.layer_names)):
            decode.visit(layer, planned)
            if not layer:
                yield "in a layer"
        worker.wait_for_save()
        report = decode.report(planned)
        worker.clear_connector_metadata()
        yield "executed"
        decode.hear(report)
        yield "reported"
        decode.finish(prompt, blocks)
        yield "finished"

    def _end(self, engine: FakeEngine, is_worker_first: bool) -> None:
        """Shut down both sides, twice each; every call must end in time."""
        sides = [engine.worker, engine.scheduler] if is_worker_first else [engine.scheduler, engine.worker]
        for side in (*sides, *sides):
            self.run(side.shutdown)

    @law("ALL-1", "ALL-7")
    @pytest.mark.parametrize("background", [False, True], ids=["", "background"])
    @pytest.mark.parametrize("point", _POINTS)
    def test_it_can_be_shut_down_at_any_point(self, point: str, background: bool) -> None:
        if background and self.background:
            pytest.skip(self.background)
        for is_worker_first in (True, False):
            with self.scope():
                prefill, decode, prompt = self.asking(background=background)
                self.run(self._go, decode, prompt, point)
                self._end(decode, is_worker_first)
                self._end(prefill, is_worker_first)

    @law("ALL-1", "ALL-5", "ALL-7")
    @pytest.mark.parametrize("is_worker_first", [True, False], ids=["worker-first", "scheduler-first"])
    def test_a_load_that_waits_ends_when_another_thread_shuts_down(self, is_worker_first: bool) -> None:
        load = self.loading()

        def step(is_held: threading.Event) -> Any:
            return load.engine.step([load.work])

        report = self._shut_down_while_it_waits(load.engine, step, is_worker_first)
        if report is not None:
            load.check_reported(report)

    @law("ALL-1", "ALL-5", "ALL-7", needs="background")
    def test_a_background_load_that_waits_ends_when_another_thread_shuts_down(self) -> None:
        decode = self.loading(background=True).engine

        def steps(is_held: threading.Event) -> None:
            while not is_held.is_set() and "a" not in decode.step([]).finished_recving:
                time.sleep(0.001)

        self._shut_down_while_it_waits(decode, steps, is_worker_first=True)

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
    @pytest.mark.parametrize("is_handed_off", [False, True])
    def test_a_producer_can_be_shut_down_in_a_prompt_and_before_it_is_fetched(
        self, is_handed_off: bool
    ) -> None:
        prefill = self.engine("producer")
        prompt = request_of("a", PROMPT)
        blocks = prefill.admit(prompt)
        self.run(prefill.step, [(prompt, blocks, 0, 40)])
        planned = prefill.plan([(prompt, blocks, 40, 60)])
        if is_handed_off:
            self.run(prefill.execute, planned)
            prefill.finish(prompt, blocks)
        else:
            prefill.worker.bind_connector_metadata(planned.metadata)
            self.run(prefill.worker.start_load_kv)
            self.run(prefill.visit, 0, planned)
        self._end(prefill, is_worker_first=not is_handed_off)

    @law("ALL-1", "ALL-4")
    def test_a_wait_for_a_peer_that_never_comes_ends_in_time_and_at_the_shutdown(self) -> None:
        decode = self.engine("consumer", config={"connect_timeout_s": _SHORT_S})
        sides = (decode.worker, decode.scheduler)
        for side in sides:
            for given in ([_SHORT_S], [0], []):  # without an argument: the config's
                call = Call(functools.partial(side.wait_until_ready, *given)).end()
                if call.error is None:
                    continue  # it waits for no peer
                error = call.raised(TimeoutError)
                assert len(str(error)) > 10, f"it does not say what it waited for: {error}"
                least = given[0] if given else _SHORT_S
                assert call.took_s >= least - 0.05, f"it gave up after {call.took_s:.3f} s of {least}"
        waiting = [Call(functools.partial(side.wait_until_ready, waits.patience_s)) for side in sides]
        waiting[0].is_blocked()
        self._end(decode, is_worker_first=True)
        for call in waiting:
            assert call.end().error is None or isinstance(call.error, KvplugError), (
                f"it raised {call.error!r}"
            )

    # -- processes that fork or leave ------------------------------------------------------------

    @law("ALL-6", needs="forked_processes")
    def test_a_forked_child_holds_nothing_loads_nothing_and_disturbs_no_engine(self) -> None:
        before = in_forked_child(held)
        prefill, decode, prompt = self.asking(num_blocks=128)
        self.check_loads(decode, prompt)
        again = request_of("forked", PROMPT, params=prompt.params)

        def look() -> str:
            found = 0
            if not self.other_processes:  # else what it loads is in this process, and so in its child
                with contextlib.suppress(ClosedError):
                    found, _ = decode.matched(again)
            for engine in (prefill, decode):
                self._end(engine, is_worker_first=True)
            return f"{found} tokens are promised there" if found else ""

        for number in range(3):
            assert not (more := more_than(before)), f"a forked child holds {more}"
            assert not (wrong := in_forked_child(look)), f"in a forked child: {wrong}"
            fresh = self.stored(prefill, range(1000 * number, 1000 * number + 100), f"s{number}")
            tokens = range(1000 * number, 1000 * number + 100)
            self.check_loads(decode, request_of(f"r{number}", tokens, params=fresh))

    @law("ALL-8", needs="forked_processes", level="long", timeout_s=120)
    @pytest.mark.parametrize("way", [*leaving.WAYS, *leaving.OTHER_WAYS])
    def test_a_program_that_leaves_while_its_engines_work_ends_with_its_own_code(self, way: str) -> None:
        leaving.check_left(self.start(_leave, self.suite_ref(), way))

    @law("ALL-7", level="long", timeout_s=300)
    def test_engines_that_come_and_go_leave_nothing(self) -> None:
        for number in range(20):
            with self.scope():
                _, decode, prompt = self.asking()
                self.run(decode.load, attrs.evolve(prompt, request_id=f"r{number}"))

    # -- the peer ------------------------------------------------------------------------------

    @law("ALL-2", "ALL-4", "ALL-5", "CONN-3")
    @pytest.mark.parametrize("was_met", [True, False])
    def test_a_peer_that_is_gone_is_a_miss_or_a_reported_failure(self, was_met: bool) -> None:
        prefill, decode = self.pair()
        if not was_met:
            decode = self.engine("consumer", seed=3)
        load = self.promised(decode, request_of("a", PROMPT, params=self.stored(prefill)))
        self._end(prefill, is_worker_first=True)
        self._computes_by_itself(load)
        late = attrs.evolve(load.prompt, request_id="b")
        blocks, _, report = self.run(decode.load, late)
        Promise(decode, late, blocks, 100, is_async=False).check_reported(report)

    def _computes_by_itself(self, load: Promise) -> None:
        """The promised KV does not arrive. The step reports that within ``timeout_s``, and the engine
        computes it.
        """
        began = time.monotonic()
        report = self.run(load.engine.step, [load.work], within=self.timeout_s + waits.patience_s)
        took = time.monotonic() - began
        limit = self.timeout_s + waits.patience_s / 2
        assert took < limit, f"the step took {took:.1f} s, and timeout_s is {self.timeout_s}"
        load.check_reported(report)
        load.check_computes_again()

    @law("ALL-2", "CONN-2")
    def test_a_peer_that_comes_back_is_found_again(self) -> None:
        prefill, decode, _ = self.asking()
        self._end(prefill, is_worker_first=True)
        prefill = self.engine("producer", seed=3)
        params = self.stored(prefill, range(2000, 2100))
        names = (f"ask{number}" for number in itertools.count())

        def is_promised() -> bool:
            return bool(self.num_promised(decode, request_of(next(names), range(2000, 2100), params=params)))

        waits.until(is_promised, 2 * waits.patience_s, what="a promise of what the new peer has")
        prompt = request_of("a", range(2000, 2100), params=params)
        self.check_loads(decode, prompt, "the peer is back, and what it has does not come")

    @law("ALL-2", "ALL-5", "ALL-7", needs="other_processes", level="long")
    @pytest.mark.parametrize("when", ["promised", "loading", "half"])
    def test_a_peer_that_is_killed_is_a_reported_failure(self, when: str) -> None:
        child, params = self.start_producer()
        if when == "half":
            self.switch.before_receiving = lambda number: child.kill() if number == 2 else None
        decode = self.engine("consumer", seed=2)
        self.meet(decode)
        load = self.promised(decode, request_of("a", PROMPT, params=params))
        if when == "promised":
            child.kill()
        if when != "loading":
            self._computes_by_itself(load)
            return
        planned = decode.plan([load.work])
        decode.worker.bind_connector_metadata(planned.metadata)
        self.run(decode.worker.start_load_kv)
        child.kill()
        for layer in range(len(decode.layer_names)):
            self.run(decode.visit, layer, planned, within=self.timeout_s + waits.patience_s)
        self.run(decode.worker.wait_for_save, within=self.timeout_s + waits.patience_s)
        report = decode.report(planned)
        decode.worker.clear_connector_metadata()
        decode.hear(report)
        load.check_reported(report)


def _leave(parent: peers.Parent, suite_ref: Any, way: str) -> None:
    """In another process: two engines, whose threads are at work while the program leaves."""
    suite = suite_from_ref(suite_ref)
    with ExitStack() as stack:
        suite.use_stack(stack)
        suite.warm_up()
        prefill, decode, prompt = suite.asking(num_blocks=256)
        sides = [side for engine in (decode, prefill) for side in (engine.worker, engine.scheduler)]

        def work() -> None:
            with contextlib.suppress(KvplugError):
                for number in itertools.count():
                    decode.ask(attrs.evolve(prompt, request_id=f"r{number}"))

        def end() -> None:
            for side in sides:
                side.shutdown()

        suite.check_loads(decode, prompt)
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.1)
        leaving.leave(parent, way, abort=end, close=end)
