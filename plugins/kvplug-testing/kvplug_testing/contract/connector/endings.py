"""Shutdown at any point, and peers that are gone (laws ALL-1, ALL-2, ALL-4, ALL-5 and ALL-7)."""

from __future__ import annotations

import random

import attrs
import pytest

from kvplug import KvplugError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.ends import ConnectorGeneral
from kvplug_testing.contract.connector.schedules import scheduled
from kvplug_testing.contract.connector.suite import PROMPT
from kvplug_testing.engine import Arrival, request_of
from kvplug_testing.waits import Call


class Endings(ConnectorGeneral):
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
