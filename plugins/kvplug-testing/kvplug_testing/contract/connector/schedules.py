"""Random schedules: the KV is right after any allowed actions of an engine (laws CONN-2 to CONN-7)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from kvplug.engine import RequestEnd
from kvplug_testing import simulated, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite
from kvplug_testing.engine import Arrival, FakeEngine, Schedule, request_of
from kvplug_testing.waits import Call

QUICK, _MANY = range(2), range(2, 26)
_few_seeds = pytest.mark.parametrize("seed", QUICK)
ON_DEVICE: Mapping[str, Any] = MappingProxyType({"device": "simulated", "config": {"device": "simulated"}})
"""The engine's cache, and what its config says of it."""


def arrivals(chance: random.Random, name: str, count: int, first: int = 0) -> list[Arrival]:
    """Requests whose prompts share prefixes. Some are aborted early."""
    made = []
    for number in range(first, first + count):
        start, common = chance.choice([0, 1000]), chance.choice([48, 96, 100])
        own = 9000 + 100 * number
        ends = [RequestEnd.FINISHED] * 4 + [RequestEnd.ABORTED, RequestEnd.FAILED]
        made.append(
            Arrival(
                request_id=f"{name}{number}",
                prompt=(*range(start, start + common), *range(own, own + chance.randrange(40))),
                generated=tuple(
                    range(500_000 + 10 * number, 500_000 + 10 * number + chance.choice([0, 1, 5]))
                ),
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

    # -- a producer and a consumer ---------------------------------------------------------------

    def _run_pair(
        self, seed: int, *, background: bool = False, spoils: bool = False, **given: Any
    ) -> Schedule:
        chance = random.Random(seed)
        prefill, decode = self.pair(background=background, num_blocks=64, **given)
        params: dict[tuple[Any, Any], dict[str, Any] | None] = {}

        def note(arrival: Arrival, given: dict[str, Any] | None) -> None:
            params[arrival.extra, arrival.prompt] = given

        ours = scheduled(prefill, chance, on_end=note)
        theirs = self._scheduled(decode, chance, spoils)
        coming = arrivals(chance, "p", 8)
        ours.submit(*coming)
        Call(ours.run).result(4 * waits.patience_s)
        # The consumer's requests: some repeat the producer's, with its parameters; some only share a prefix.
        again = [self._again(each, params.get((each.extra, each.prompt))) for each in coming]
        chance.shuffle(again)
        ours.submit(*arrivals(chance, "p", 4, first=100))
        theirs.submit(*again, *arrivals(chance, "d", 4, first=200))
        Call(lambda: theirs.run_with(ours)).result(4 * waits.patience_s)
        self.inject_fault("")
        return theirs

    def _scheduled(self, fake: FakeEngine, chance: random.Random, spoils: bool) -> Schedule:
        """``spoils``: the first load fails, and some later ones."""

        def before_step() -> None:
            if spoils:
                self.inject_fault("fail" if not schedule.audit.num_failed or chance.random() < 0.4 else "")

        schedule = scheduled(fake, chance, before_step=before_step)
        schedule.audit.must_arrive = not spoils
        return schedule

    @staticmethod
    def _again(each: Arrival, params: dict[str, Any] | None) -> Arrival:
        return Arrival(
            request_id=each.request_id.replace("p", "d"),
            prompt=each.prompt,
            generated=each.generated,
            extra=each.extra,
            params=params or {},
            end=each.end,
        )

    def _check_pair(self, seed: int, **given: Any) -> None:
        done = self._run_pair(seed, **given)
        assert done.audit.num_loaded, "nothing was loaded, though much was stored"

    @law("CONN-2", "CONN-1", "CONN-4", "CONN-5")
    @_few_seeds
    def test_whatever_two_engines_do_what_arrives_is_right(self, seed: int) -> None:
        self._check_pair(seed)

    @law("CONN-4", "CONN-5", "CONN-2", "CONN-1", needs="background")
    @_few_seeds
    def test_whatever_goes_on_beside_a_load_its_blocks_are_its_own(self, seed: int) -> None:
        self._check_pair(1000 + seed, background=True)

    @law("CONN-3")
    @_few_seeds
    def test_whatever_fails_is_reported_and_never_used(self, seed: int) -> None:
        done = self._run_pair(2000 + seed, spoils=True)
        self.skip_unless_injected()
        assert done.audit.num_failed, "no load failed, though many were made to"

    @law("CONN-3", "CONN-4", "CONN-5", needs="background")
    @_few_seeds
    def test_whatever_fails_in_the_background_is_reported_and_never_used(self, seed: int) -> None:
        self._run_pair(3000 + seed, background=True, spoils=True)
        self.skip_unless_injected()

    # -- one engine that saves and loads ---------------------------------------------------------

    def _run_both(
        self,
        seed: int,
        *,
        spoils: bool = False,
        background: bool = False,
        other_loads: bool = False,
        **given: Any,
    ) -> Schedule:
        chance = random.Random(seed)
        fake = self.both(num_blocks=96, background=background, **given)
        schedule = self._scheduled(fake, chance, spoils)
        schedule.other_loads = other_loads
        for first in () if other_loads else (0, 1000):  # so that there is KV to load from the beginning
            self.stored(fake, range(first, first + 96), f"stored{first}")
        self._forget_blocks(fake, schedule)
        coming = arrivals(chance, "r", 16)
        schedule.submit(*coming)
        Call(schedule.run).result(4 * waits.patience_s)
        self.inject_fault("")
        # KV that it has saved in the meantime is right: another request loads it.
        fresh = scheduled(fake, chance)
        fresh.submit(*(self._again(each, None) for each in coming))
        Call(fresh.run).result(4 * waits.patience_s)
        return schedule

    @staticmethod
    def _forget_blocks(fake: FakeEngine, schedule: Schedule) -> None:
        """Free the blocks of finished prompts for other requests."""
        known = set(fake.free_blocks)
        for block in range(fake.cache.num_blocks):
            if block not in known:
                fake.free_blocks.append(block)
                schedule.add_free(block)

    @law("CONN-2", "CONN-4", "CONN-5")
    @_few_seeds
    def test_whatever_an_engine_does_what_it_gets_back_is_right(self, seed: int) -> None:
        self._run_both(4000 + seed, background=self._every_other(seed))

    def _every_other(self, seed: int) -> bool:
        """Whether the engine loads in the background with this seed."""
        return not self.background and seed % 2 == 1

    @law("CONN-6", "CONN-3", needs="own_faults")
    @_few_seeds
    def test_whatever_fails_with_steps_in_flight_nothing_wrong_is_saved(self, seed: int) -> None:
        self._run_both(5000 + seed, spoils=True)

    @law("CONN-6", "CONN-3", needs="others_beside_it")
    @_few_seeds
    def test_whatever_another_connector_loads_nothing_wrong_is_saved(self, seed: int) -> None:
        self._run_both(9000 + seed, other_loads=True)

    # -- caches on a device ----------------------------------------------------------------------

    @law("CONN-10", "CONN-2", "CONN-4", "CONN-5", needs="devices")
    @_few_seeds
    def test_whatever_two_engines_with_caches_on_a_device_do_what_arrives_is_right(self, seed: int) -> None:
        with simulated.seeded(seed):
            self._check_pair(7000 + seed, background=self._every_other(seed), **ON_DEVICE)

    @law("CONN-10", "CONN-2", "CONN-4", "CONN-5", needs="devices")
    @_few_seeds
    def test_whatever_an_engine_on_a_device_does_what_it_gets_back_is_right(self, seed: int) -> None:
        with simulated.seeded(seed):
            self._run_both(8000 + seed, background=self._every_other(seed), **ON_DEVICE)

    # -- all of it, for long ---------------------------------------------------------------------

    @law("CONN-2", "CONN-1", "CONN-3", "CONN-4", "CONN-5", "CONN-6", "CONN-7", "CONN-10", level="long")
    @pytest.mark.parametrize("seed", _MANY)
    @pytest.mark.parametrize("what", ["pair", "background", "faults", "others", "device", "resets"])
    def test_whatever_engines_do_for_long_what_arrives_is_right(self, what: str, seed: int) -> None:
        needs = {
            "background": self.background,
            "faults": self.own_faults,
            "others": self.others_beside_it,
            "device": self.devices,
        }
        if needs.get(what):
            pytest.skip(needs[what])
        match what:
            case "pair" | "background":
                self._check_pair(1000 + seed, background=what == "background")
            case "faults" | "others":
                self._run_both(5000 + seed, spoils=what == "faults", other_loads=what == "others")
            case "device":
                with simulated.seeded(seed):
                    self._check_pair(7000 + seed, background=self._every_other(seed), **ON_DEVICE)
            case _:
                self._run_resets(6000 + seed)

    # -- resets ----------------------------------------------------------------------------------

    def _run_resets(self, seed: int) -> None:
        chance = random.Random(seed)
        fake = self.both(num_blocks=128)
        schedule = scheduled(fake, chance)
        schedule.audit.must_arrive = False  # the reset may have removed KV that was promised before
        schedule.submit(*arrivals(chance, "r", 10))

        def run() -> bool:
            for number in range(4):
                for _ in range(chance.randrange(10, 60)):
                    if schedule.has_work:
                        schedule.move()
                if not schedule.change_weights():
                    return False
                schedule.submit(*arrivals(chance, "r", 4, first=100 * (number + 1)))
            schedule.run()
            return True

        if not Call(run).result(4 * waits.patience_s):
            pytest.skip(f"{self.called} says that it cannot forget: reset_cache returned false")
        schedule.audit.must_arrive = True
        # New requests must not load old KV: each of their tokens is checked.
        fresh = scheduled(fake, chance)
        fresh.submit(*arrivals(chance, "fresh", 8, first=900))
        Call(fresh.run).result(4 * waits.patience_s)

    def _resets(self, engine: FakeEngine) -> None:
        if self.run(engine.scheduler.reset_cache) is not True:
            pytest.skip(f"{self.called} says that it cannot forget: reset_cache returned false")

    @law("CONN-7")
    def test_what_was_stored_before_a_reset_is_not_had_after_it(self) -> None:
        engine = self.both()
        self.stored(engine)
        self._resets(engine)
        engine.weights = 1
        for name in ("at-once", "later"):
            found = self.num_promised(engine, request_of(name, PROMPT))
            assert found == 0, f"{found} tokens that were computed before the reset are promised"
            self.run(engine.settle)
            engine.step([])
        self.stored(engine, name="again")
        self.check_loads(engine, request_of("last", PROMPT), "what was computed since cannot be had")

    @law("CONN-7")
    def test_a_prompt_begun_before_a_reset_is_not_had_after_it(self) -> None:
        engine = self.both()
        prompt = request_of("a", PROMPT)
        blocks = engine.admit(prompt)
        planned = [engine.plan([(prompt, blocks, 0, 40)]), engine.plan([(prompt, blocks, 40, 30)])]
        engine.hear(engine.execute(planned[0]))
        self._resets(engine)
        engine.hear(engine.execute(planned[1]))  # a step that was planned before
        engine.weights = 1
        engine.step([(prompt, blocks, 70, 30)])
        engine.finish(prompt, blocks)
        self.run(engine.settle)
        again = request_of("b", PROMPT)
        loaded, found, report = self.run(engine.load, again)
        wrong = engine.cache.wrong_blocks(again.token_ids, loaded, 0, 100) - report.invalid_block_ids
        assert not wrong, f"{found} tokens were promised, and some were computed before the reset"
