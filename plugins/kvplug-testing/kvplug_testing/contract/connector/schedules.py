"""Random schedules: the KV is right after any allowed actions of an engine (laws CONN-2 to CONN-7)."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest

from kvplug.engine import RequestEnd
from kvplug_testing import simulated, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite
from kvplug_testing.engine import Arrival, FakeEngine, Schedule, request_of
from kvplug_testing.engine.cache import AXES

_LAYOUTS = [
    *({"axes": axes} for axes in AXES),
    {"axes": "BHTKD", "block_size": 8},
    {"axes": "KBHTD", "block_format": "transposed"},
    {"producer": {"block_size": 32}},
    {"consumer": {"block_size": 32, "num_blocks": 32}},
]
_few_seeds = pytest.mark.parametrize("seed", range(2))
_LONG = {
    "test_whatever_engines_do_what_arrives_is_right": "",
    "test_whatever_fails_with_steps_in_flight_nothing_wrong_is_saved": "own_faults",
    "test_whatever_engines_with_caches_on_a_device_do_what_arrives_is_right": "devices",
}
"""Tests that run with many seeds at level long, and what they need."""


def arrivals(chance: random.Random, name: str, count: int, first: int = 0) -> list[Arrival]:
    """Requests whose prompts share prefixes. Some are aborted early."""
    made = []
    for number in range(first, first + count):
        start, common = chance.choice([0, 1000]), chance.choice([48, 96, 100])
        own, new = 9000 + 100 * number, 500_000 + 10 * number
        ends = [RequestEnd.FINISHED] * 4 + [RequestEnd.ABORTED, RequestEnd.FAILED]
        made.append(
            Arrival(
                request_id=f"{name}{number}",
                prompt=(*range(start, start + common), *range(own, own + chance.randrange(40))),
                generated=tuple(range(new, new + chance.choice([0, 1, 5]))),
                extra=chance.choice([b"", b"", b"adapter"]),
                end=chance.choice(ends),
            )
        )
    return made


def scheduled(fake: FakeEngine, chance: random.Random, **given: Any) -> Schedule:
    """A schedule with a random number of steps planned ahead, and with or without draft tokens."""
    return Schedule(fake, chance, depth=chance.choice([1, 2, 2, 4]), drafts=chance.random() < 0.3, **given)


class Schedules(ConnectorSuite):
    """Each seed is one random schedule; every promise of the connector is checked after each action."""

    def _run_pair(self, seed: int, *, background: bool = False, spoils: str = "", **given: Any) -> Schedule:
        """A producer and a consumer."""
        chance = random.Random(seed)
        if self.lends_blocks:  # all that is handed out before anything is read
            given["producer"] = {"num_blocks": 160, **given.get("producer", {})}
        prefill, decode = self.pair(background=background, **given)
        params: dict[tuple[Any, Any], dict[str, Any] | None] = {}

        def note(arrival: Arrival, given: dict[str, Any] | None) -> None:
            params[arrival.extra, arrival.prompt] = given

        ours = scheduled(prefill, chance, on_end=note)
        theirs = self._scheduled(decode, chance, spoils)
        coming = arrivals(chance, "p", 8)
        ours.submit(*coming)
        self.run(ours.run, within=4 * waits.patience_s)
        # The consumer's requests: some repeat the producer's, with its parameters; some only share a prefix.
        again = [
            attrs.evolve(
                each,
                request_id=each.request_id.replace("p", "d"),
                params=params.get((each.extra, each.prompt)) or {},
            )
            for each in coming
        ]
        chance.shuffle(again)
        ours.submit(*arrivals(chance, "p", 4, first=100))
        theirs.submit(*again, *arrivals(chance, "d", 4, first=200))
        self.run(theirs.run, ours, within=4 * waits.patience_s)
        self.inject_fault("")
        assert spoils or theirs.audit.num_loaded, "nothing was loaded, though much was stored"
        return theirs

    def _scheduled(self, fake: FakeEngine, chance: random.Random, spoils: str) -> Schedule:
        """``spoils``: how loads fail, the first one and some later ones."""

        def before_step() -> None:
            if spoils:
                self.inject_fault(spoils if not schedule.audit.num_failed or chance.random() < 0.4 else "")

        schedule = scheduled(fake, chance, before_step=before_step)
        schedule.audit.must_arrive = not spoils
        return schedule

    def _run_both(self, seed: int, *, spoils: str = "", **given: Any) -> None:
        """One engine that saves and loads."""
        chance = random.Random(seed)
        fake = self.both(num_blocks=96, **given)
        for first in (0, 1000):  # so that there is KV to load from the beginning
            blocks = self.run(fake.prefill, request_of(f"stored{first}", range(first, first + 96)))
            fake.free_blocks += blocks
        schedule = self._scheduled(fake, chance, spoils)
        coming = arrivals(chance, "r", 16)
        schedule.submit(*coming)
        self.run(schedule.run, within=4 * waits.patience_s)
        self.inject_fault("")
        # KV that it has saved in the meantime is right: the same requests load it.
        fresh = scheduled(fake, chance)
        fresh.submit(*coming)
        self.run(fresh.run, within=4 * waits.patience_s)

    def _every_other(self, seed: int) -> bool:
        """Whether the engine loads in the background with this seed."""
        return not self.background and seed % 2 == 1

    def _run_engines(self, seed: int, **given: Any) -> None:
        """A producer and a consumer, and then one engine that saves and loads."""
        background = self._every_other(seed)
        with self.scope():
            self._run_pair(seed, background=background, **given)
        if self.lends_blocks:
            return
        self._run_both(seed, background=background, **given)

    @law("CONN-2", "CONN-1", "CONN-4", "CONN-5")
    @_few_seeds
    def test_whatever_engines_do_what_arrives_is_right(self, seed: int) -> None:
        self._run_engines(seed)

    @law("CONN-2", "CONN-4")
    @pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
    def test_whatever_the_layout_is_what_arrives_is_right(self, layout: dict[str, Any]) -> None:
        self._run_pair(0, **layout)

    @law("CONN-3", "CONN-4", "CONN-5")
    @_few_seeds
    @pytest.mark.parametrize("how", ["fail", "corrupt"])
    def test_whatever_fails_is_reported_and_never_used(self, how: str, seed: int) -> None:
        done = self._run_pair(seed, background=self._every_other(seed), spoils=how)
        self.skip_unless_injected()
        assert done.audit.num_failed, "no load failed, though many were made to"

    @law("CONN-6", "CONN-3", needs="own_faults")
    @_few_seeds
    def test_whatever_fails_with_steps_in_flight_nothing_wrong_is_saved(self, seed: int) -> None:
        self._run_both(seed, spoils="fail")

    @law("CONN-10", "CONN-2", "CONN-4", "CONN-5", needs="devices")
    @_few_seeds
    def test_whatever_engines_with_caches_on_a_device_do_what_arrives_is_right(self, seed: int) -> None:
        with simulated.seeded(seed):
            self._run_engines(seed, device="simulated", config={"device": "simulated"})

    @law("CONN-2", "CONN-1", "CONN-3", "CONN-4", "CONN-5", "CONN-6", "CONN-10", level="long")
    @pytest.mark.parametrize("seed", range(2, 26))
    @pytest.mark.parametrize("test", _LONG)
    def test_whatever_engines_do_for_long_what_arrives_is_right(self, test: str, seed: int) -> None:
        needs = _LONG[test]
        if reason := needs and getattr(self, needs):
            pytest.skip(reason)
        getattr(self, test)(seed)

    @law("CONN-7")
    def test_nothing_that_was_stored_or_begun_before_a_reset_is_had_after_it(self) -> None:
        engine, reader = self.pair() if self.lends_blocks else 2 * (self.both(),)
        stored = request_of("stored", range(5000, 5100), params=self.stored(engine, range(5000, 5100)))
        prompt = request_of("a", PROMPT)
        blocks = engine.admit(prompt)
        planned = [engine.plan([(prompt, blocks, 0, 40)]), engine.plan([(prompt, blocks, 40, 30)])]
        engine.hear(engine.execute(planned[0]))
        if self.run(engine.scheduler.reset_cache) is not True:
            pytest.skip(f"{self.called} cannot ensure a reset: reset_cache returned false")
        engine.hear(engine.execute(planned[1]))  # a step that was planned before
        engine.cache.weights = reader.cache.weights = 1
        engine.step([(prompt, blocks, 70, 30)])
        prompt = attrs.evolve(prompt, params=engine.finish(prompt, blocks)[1] or {})
        self.run(engine.settle)
        for again in (prompt, stored):
            self.run_load(self.admitted(reader, attrs.evolve(again, request_id=f"{again.request_id} again")))
        params = self.stored(engine, range(7000, 7100), "later")
        last = request_of("last", range(7000, 7100), params=params)
        self.check_loads(reader, last, "what was computed since is not kept")
