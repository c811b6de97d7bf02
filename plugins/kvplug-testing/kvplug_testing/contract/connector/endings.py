"""Shutdown at any point, dead peers, forks and programs that leave (laws ALL-1, ALL-2 and ALL-4 to ALL-8)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
import time
from contextlib import ExitStack
from typing import Any

import attrs
import pytest

from kvplug import ClosedError, KvplugError, TimeoutError
from kvplug_testing import peers, waits
from kvplug_testing.contract import leaving
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.schedules import scheduled
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.engine import Arrival, request_of
from kvplug_testing.waits import Call

_SHORT_S = 0.3


class Endings(ConnectorSuite):
    """One side, both sides or the peer end while a request is in any state."""

    @law("ALL-1", "ALL-7")
    @pytest.mark.parametrize("background", [False, True], ids=["", "background"])
    @pytest.mark.parametrize("seed", range(8))
    def test_it_can_be_shut_down_at_any_point(self, seed: int, background: bool) -> None:
        self.skip_unless_possible(background)
        chance = random.Random(seed)
        prefill, decode, prompt = self.asking(background=background)
        schedule = scheduled(decode, chance)
        first = Arrival(request_id="r", prompt=prompt.token_ids, params=prompt.params)
        schedule.submit(first, *(attrs.evolve(first, request_id=f"r{number}") for number in range(2)))
        for _ in range(chance.randrange(16)):
            if schedule.has_work:
                self.run(schedule.move)
        for engine in (decode, prefill):
            self.shut(engine, is_worker_first=bool(seed % 2))

    @law("ALL-1", "ALL-5", "ALL-7")
    @pytest.mark.parametrize("is_worker_first", [True, False], ids=["worker-first", "scheduler-first"])
    def test_a_load_that_waits_ends_when_another_thread_shuts_down(self, is_worker_first: bool) -> None:
        load = self.loading()
        with self.holding_up() as is_held:
            step = Call(lambda: load.engine.step([load.work]))
            waits.until(lambda: is_held.is_set() or step.ended, what="a load that is held up")
            if not is_held.is_set():
                pytest.skip(f"no load of {self.called} is held up in a pipe (override holding_up)")
            self.shut(load.engine, is_worker_first)
            step.end()
        ended = step.outcome()
        if not isinstance(ended, KvplugError):
            load.check_reported(ended)

    @law("ALL-1", "ALL-4")
    def test_a_wait_for_a_peer_that_never_comes_ends_in_time_and_at_the_shutdown(self) -> None:
        decode = self.engine("consumer", config={"connect_timeout_s": _SHORT_S})
        sides = (decode.worker, decode.scheduler)
        for side in sides:
            call = Call(side.wait_until_ready).end()
            if call.error is not None:  # else it waits for no peer
                call.raised(TimeoutError)
                assert call.took_s >= _SHORT_S - 0.05, f"it gave up after {call.took_s:.3f} s"
        waiting = [Call(functools.partial(side.wait_until_ready, waits.patience_s)) for side in sides]
        waiting[0].is_blocked()
        self.shut(decode)
        for call in waiting:
            call.outcome()

    # -- processes that fork or leave ------------------------------------------------------------

    @law("ALL-6", needs="forked_processes")
    def test_a_forked_child_holds_nothing_loads_nothing_and_disturbs_no_engine(self) -> None:
        before = in_forked_child(held)
        prefill, decode, prompt = self.asking(num_blocks=128)
        self.check_loads(decode, prompt)

        def look() -> str:
            found = 0
            if not self.other_processes:  # else what it loads is in this process, and so in its child
                with contextlib.suppress(ClosedError):
                    found, _ = decode.matched(attrs.evolve(prompt, request_id="forked"))
            for engine in (prefill, decode):
                self.shut(engine)
            return f"{found} tokens are promised there" if found else ""

        assert not (more := more_than(before)), f"a forked child holds {more}"
        assert not (wrong := in_forked_child(look)), f"in a forked child: {wrong}"
        fresh = self.stored(prefill, range(1000, 1100), "later")
        self.check_loads(decode, request_of("b", range(1000, 1100), params=fresh))

    @law("ALL-8", needs="forked_processes", level="long", timeout_s=120)
    @pytest.mark.parametrize("way", leaving.WAYS)
    def test_a_program_that_leaves_while_its_engines_work_ends_with_its_own_code(self, way: str) -> None:
        leaving.check_left(self.start(_leave, self.suite_ref(), way))

    # -- the peer ------------------------------------------------------------------------------

    @law("ALL-2", "ALL-4", "ALL-5", "CONN-2", "CONN-3")
    @pytest.mark.parametrize("was_met", [True, False])
    def test_a_peer_that_is_gone_is_a_reported_failure_until_it_is_back(self, was_met: bool) -> None:
        prefill, decode = self.pair()
        if not was_met:
            decode = self.engine("consumer", seed=3)
        load = self.promised(decode, request_of("a", PROMPT, params=self.stored(prefill)))
        self.shut(prefill)
        step = Call(lambda: decode.step([load.work]))
        load.check_reported(step.result(self.timeout_s + waits.patience_s))
        took, limit = step.took_s, self.timeout_s + waits.patience_s / 2
        assert took < limit, f"the step took {took:.1f} s, and timeout_s is {self.timeout_s}"
        load.check_computes_again()
        self.run_load(self.admitted(decode, attrs.evolve(load.prompt, request_id="b")))
        prefill = self.engine("producer", seed=4)  # it comes back
        params = self.stored(prefill, range(2000, 2100))
        prompt = request_of("c", range(2000, 2100), params=params)
        self.until_promised(decode, prompt)
        self.check_loads(decode, prompt, "the peer is back, and what it has does not come")


def _leave(parent: peers.Parent, suite_ref: Any, way: str) -> None:
    """In another process: two engines, whose threads are at work while the program leaves."""
    suite = suite_from_ref(suite_ref)
    with ExitStack() as stack:
        suite.use_stack(stack)
        suite.warm_up()
        prefill, decode, prompt = suite.asking(num_blocks=256)

        def work() -> None:
            with contextlib.suppress(KvplugError):
                for number in itertools.count():
                    decode.ask(attrs.evolve(prompt, request_id=f"r{number}"))

        def end() -> None:
            for engine in (decode, prefill):
                suite.shut(engine)

        suite.check_loads(decode, prompt)
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.1)
        leaving.leave(parent, way, abort=end, close=end)
