"""What is held is loaded where that is cheaper than computing it, whatever else an engine computes."""

from __future__ import annotations

import random
import time
from typing import Any

import attrs
import pytest

from kvplug.engine import WorkerOutput
from kvplug.transport import DeviceMark
from kvplug_lookup.connector.load_cost import COMPUTE, LoadCostModel, MeasuredCosts
from kvplug_testing import simulated
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call, until
from lookup_engines import PROMPT, an_address, assert_loads, config, pair, worker_report

pytestmark = pytest.mark.timeout(60)

STORE, PEER = "store", "peer"


@attrs.frozen
class Mark:
    """A mark of a device that has passed it."""

    at: float
    is_passed = True

    def seconds_since(self, other: Mark) -> float:
        return self.at - other.at


def marks(seconds: float) -> Any:
    return Mark(0.0), Mark(seconds)


class Engine:
    """The costs of an engine that is simulated by arithmetic, as its connector measures them."""

    def __init__(self, per_token: float, latency: float, per_loaded: float) -> None:
        self.step_s, self.per_token = 10e-3, per_token
        self.latency, self.per_loaded = latency, per_loaded
        self.measured, self.model = MeasuredCosts(), LoadCostModel()
        self.now = 0.0

    def step(self, num_of_prompts: int, num_decoded: int) -> None:
        num_tokens = num_of_prompts + num_decoded
        if 2 * num_of_prompts >= num_tokens:  # as the scheduler's side plans it
            self.measured.note_step(num_tokens, *marks(self.step_s + num_tokens * self.per_token))

    def load(self, source: str, num_tokens: int, at_once: int = 1) -> None:
        begun = self.now
        for _ in range(at_once):  # they share the way
            self.now += self.latency + num_tokens * self.per_loaded
            self.measured.note_load(source, num_tokens, begun, self.now)

    def decide(self, source: str, num_tokens: int) -> bool:
        if (costs := self.measured.take()) is not None:
            self.model.update(0, costs)
        return self.model.should_load({source: num_tokens}, frozenset({PEER}))

    def ratio(self, num_tokens: int) -> float:
        """The truth: how many times as long as computing a load takes."""
        return (self.latency + num_tokens * self.per_loaded) / (num_tokens * self.per_token)


def decode_heavy(engine: Engine, dice: random.Random) -> None:
    for _ in range(200):
        engine.step(0, dice.randint(1, 64))
        if dice.random() < 0.1:
            engine.step(1, dice.choice([0, 1]))  # the last token of a prompt that was loaded
        if dice.random() < 0.05:
            engine.step(dice.choice([512, 2048]), dice.randint(1, 64))


def prefill_heavy(engine: Engine, dice: random.Random) -> None:
    for _ in range(50):
        engine.step(dice.choice([512, 2048, 8192]), dice.randint(0, 8))
        engine.step(dice.randint(1, 64), dice.randint(0, 4))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("traffic", [decode_heavy, prefill_heavy])
@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize(("source", "margin"), [(STORE, 2.0), (PEER, 4.0)])
def test_every_decision_is_that_of_the_true_costs(
    traffic: Any, at_once: int, source: str, margin: float, seed: int
) -> None:
    dice = random.Random(seed)
    seen = set()
    for latency in (1e-4, 5e-3, 50e-3):
        for per_loaded in (1e-6, 61e-6, 1e-3):
            engine = Engine(61e-6, latency, per_loaded)
            traffic(engine, dice)
            for _ in range(10):
                engine.load(source, dice.choice([128, 1024, 8192]), at_once)
            for num_tokens in (128, 1024, 8192):
                ratio = engine.ratio(num_tokens)
                if not margin / 1.5 < ratio < margin * 1.5:  # else either is right
                    decided = engine.decide(source, num_tokens)
                    assert decided == (ratio < margin), (latency, per_loaded, num_tokens, ratio)
                    seen.add(decided)
    assert seen == {True, False}


def test_one_in_32_loads_that_cost_too_much_is_made_and_a_single_measurement_is_not_used() -> None:
    engine = Engine(1e-6, 0.0, 1e-3)
    engine.step(1000, 0)
    engine.load(STORE, 1000)
    assert engine.decide(STORE, 1000), "the first one may have connected"
    engine.load(STORE, 1000)
    assert [engine.decide(STORE, 1000) for _ in range(64)].count(True) == 2


def test_a_load_that_costs_too_much_is_not_promised_and_is_counted() -> None:
    with pair(consumer={"lookup": {"load_policy": "auto"}}) as (prefill, decode):
        prefill.prefill(request_of("stored", PROMPT))
        assert_loads(decode, request_of("first", PROMPT), 96)  # nothing is known yet

        def hear(per_loaded: float) -> None:
            costs = {COMPUTE: (0.0, 1e-6), "peer": (0.0, per_loaded)}
            decode.scheduler.update_connector_output(worker_report(0, 1, costs=costs))

        hear(1e-3)
        assert decode.matched(request_of("a", PROMPT)) == (0, False)
        assert decode.scheduler.get_stats()["failures"]["match"] == {"not_worth_it": 1}
        hear(3e-6)
        assert decode.matched(request_of("b", PROMPT)) == (96, False), "a peer has computed it for us"


def rates(report: WorkerOutput) -> Any:
    return next((part["costs"] for part in report.worker_metadata if part["costs"]), None)  # type: ignore[attr-defined]


def test_on_a_device_a_steps_time_ends_when_its_work_is_done() -> None:
    with FakeEngine(config("both", host=an_address("timed")), device="simulated") as engine:
        prompt = request_of("a", PROMPT)
        planned = engine.plan([(prompt, engine.admit(prompt), 0, 100)])
        DeviceMark(next(iter(engine.kv_caches.values())).device).wait()
        with simulated.stalled():
            assert rates(Call(lambda: engine.execute(planned)).result()) is None
            time.sleep(0.2)
        found: list[Any] = []
        until(lambda: found.append(rates(engine.step([]))) or found[-1], what="what the step took")
        assert found[-1][COMPUTE][1] > 0.2 / 100
