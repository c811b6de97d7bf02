"""How long a producer keeps blocks: for a lease, for a reader that waits, and not longer."""

from __future__ import annotations

import itertools
import time

import attrs
import pytest

from kvplug.engine import RequestEnd
from kvplug_p2p.engines import matches
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call
from p2p_engines import PROMPT, Sharded, an_address, config, failures, loaded, pair, stored, until_named

pytestmark = pytest.mark.timeout(60)


def test_blocks_that_nobody_asks_for_come_back_when_the_lease_is_over() -> None:
    with pair({"lease_s": 1.0}) as (prefill, decode):
        params = stored(prefill)
        began = time.monotonic()
        until_named(prefill, "stored")
        assert 0.9 < time.monotonic() - began < 3
        assert prefill.figures()["failures"]["save"] == {"expired": 1}
        assert decode.matched(request_of("a", PROMPT, params=params)) == (0, False)
        assert failures(decode.scheduler, "match") == {"expired": 1}


def named_within(prefill: FakeEngine, seconds: float) -> set[str]:
    """The requests whose blocks come back in these seconds."""
    names, end = set(), time.monotonic() + seconds
    while time.monotonic() < end:
        names |= prefill.step([]).finished_sending
        time.sleep(0.01)
    return names


def test_a_request_that_waits_for_blocks_keeps_its_claim_beyond_the_lease() -> None:
    """Also while others' claims are answered all the time."""
    with pair({"lease_s": 1.0}, producer={"num_blocks": 256}) as (prefill, decode):
        waiting = request_of("a", PROMPT, params=stored(prefill))
        assert decode.matched(waiting) == (96, False)
        end = time.monotonic() + 3
        for number in itertools.count():
            params = stored(prefill, f"other {number}", range(1000, 1020))
            assert loaded(decode, request_of(f"b{number}", range(1000, 1020), params=params)) == 16
            assert "stored" not in named_within(prefill, 0.05)
            if time.monotonic() > end:
                break
        assert loaded(decode, waiting) == 96
        until_named(prefill, "stored")


def test_a_claim_that_is_sooner_than_the_producers_next_step_waits_for_it() -> None:
    with pair() as (prefill, decode):
        prompt = request_of("stored", PROMPT)
        blocks = prefill.admit(prompt)
        prefill.step([(prompt, blocks, 0, 100)])
        _, params = prefill.finish(prompt, blocks)
        asking = request_of("a", PROMPT, params=params)
        asked = Call(lambda: decode.matched(asking))
        assert asked.is_blocked(), f"answered with {asked.value} before the blocks were kept"
        prefill.step([])
        assert asked.result() == (96, False)
        ops = decode.scheduler.get_stats()["ops"]
        assert {op: ops[op]["count"] for op in ("match", "wait")} == {"match": 1, "wait": 1}
        (trace_id,) = {ops[op]["samples"][0][1] for op in ("match", "wait")}
        assert len(trace_id) == 32
        assert loaded(decode, asking) == 96
        until_named(prefill, "stored")


@pytest.mark.parametrize(
    "point", ["asked", "allocated", "planned", "loading", "preempted", "failed", "refused"]
)
def test_a_request_that_ends_gives_the_blocks_back_at_once(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = point in ("planned", "loading")
    with pair({"lease_s": 600.0, "async_load": background}) as (prefill, decode):
        prompt = request_of("a", PROMPT, params=stored(prefill))
        assert decode.matched(prompt) == (96, background)
        assert not named_within(prefill, 0.1)
        blocks = decode.allocate(100)
        if point == "refused":  # the engine takes another connector's tokens
            decode.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
            until_named(prefill, "stored")
            return
        if point != "asked":
            decode.scheduler.update_state_after_alloc(prompt, (blocks,), 96)
        if point == "preempted":  # before a step knows of the load: it is asked about again
            decode.execute(decode.plan([], preempted=frozenset({"a"})))
            prompt = attrs.evolve(prompt, generation=1)
            assert decode.ask(prompt) == (96, False)
            assert not named_within(prefill, 0.1)
        if point == "failed":
            monkeypatch.setattr("kvplug_p2p.pull.hash_of", lambda *_: b"")
            assert decode.step([]).invalid_block_ids == {*blocks[:6]}
        step = decode.plan([]) if point == "planned" else None
        if point == "loading":
            decode.step([])
        if point != "failed":
            keeps, _ = decode.finish(prompt, blocks, RequestEnd.ABORTED)
            assert keeps == background
        if step is not None:
            decode.hear(decode.execute(step))
        decode.settle()
        until_named(prefill, "stored", within=5)


def test_a_second_reader_of_the_same_blocks_keeps_them_when_the_first_is_done() -> None:
    with pair({"lease_s": 600.0}) as (prefill, decode):
        params = stored(prefill)
        later = request_of("later", PROMPT, params=params)
        assert decode.matched(later) == (96, False)
        assert loaded(decode, request_of("a", PROMPT, params=params)) == 96
        assert not named_within(prefill, 0.2)
        assert loaded(decode, later) == 96
        until_named(prefill, "stored")
        assert decode.matched(request_of("replay", PROMPT, params=params)) == (0, False)
        assert failures(decode.scheduler, "match") == {"gone": 1}


def test_a_consumer_that_is_shut_down_gives_all_back_at_once() -> None:
    with pair({"lease_s": 600.0}) as (prefill, decode):
        for number in range(3):
            params = stored(prefill, f"p{number}", range(20))
            assert decode.matched(request_of(f"d{number}", range(20), params=params)) == (16, False)
        decode.scheduler.shutdown()
        until_named(prefill, "p0", "p1", "p2", within=5)


# -- an engine that hangs ------------------------------------------------------------------------------


def test_the_claim_of_an_engine_that_makes_no_steps_is_given_up() -> None:
    """Its scheduler waits for a worker that hangs. The threads that renew claims do not."""
    with pair({"lease_s": 1.0}, timeout_s=3.0) as (prefill, decode):
        prompt = request_of("a", PROMPT, params=stored(prefill))
        assert decode.matched(prompt) == (96, False)
        assert not named_within(prefill, 1.5)
        until_named(prefill, "stored", within=8)
        assert decode.ask(prompt) == (0, False)
        assert failures(decode.scheduler, "match") == {"stalled": 1}
        assert loaded(decode, request_of("b", PROMPT, params=stored(prefill, "again"))) == 96


@pytest.mark.parametrize("size", [1, 2])
def test_the_claim_of_a_pull_that_one_worker_does_not_begin_is_given_up(size: int) -> None:
    with pair(
        {"lease_s": 1.0, "async_load": True},
        timeout_s=3.0,
        make=Sharded,
        num_heads=2,
        producer={"size": 1},
        consumer={"size": size},
    ) as (prefill, decode):
        prompt = request_of("a", PROMPT, params=stored(prefill))
        assert decode.matched(prompt) == (96, True)
        blocks = decode.allocate(100)
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), 96)
        planned, every = decode.plan([]), decode.worker.workers
        decode.worker.workers = every[:-1]  # the last one hangs
        if size > 1:
            decode.hear(decode.execute(planned))
        assert not named_within(prefill, 1.5)
        until_named(prefill, "stored", within=8)
        decode.worker.workers = every[-1:]  # it goes on, with this step
        report = decode.execute(planned)
        while not report.finished_recving:
            report = decode.execute(attrs.evolve(planned, metadata=decode.plan([]).metadata))
        assert report.invalid_block_ids == {*blocks[:6]}, "it has loaded from blocks that were given back"


# -- who is dialled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("10.0.7.12:29555", True),
        ("unix:@prefill-3-0", True),
        ("10.0.7.12:29556", False),
        ("10.0.7.1.evil.example:29555", False),
        ("10.0.7.12:80#:29555", False),
        ("10.0.7.12:29555\n", False),
        ("x10.0.7.12:29555", False),
        ("10a0.7.12:29555", False),
        ("unix:@prefill-/3-0", False),
        ("", False),
    ],
)
def test_an_address_is_dialled_if_a_pattern_matches_it_in_each_part(address: str, is_allowed: bool) -> None:
    patterns = ("10.0.7.*:29555", "unix:@prefill-*-0")
    assert any(matches(pattern, address) for pattern in patterns) == is_allowed


def test_a_producer_that_only_a_request_names_is_dialled_if_it_is_allowed() -> None:
    mine, other, consumer = an_address("mine"), an_address("other"), an_address("decode")
    with (
        FakeEngine(config("producer", host=mine), seed=1) as prefill,
        FakeEngine(config("producer", host=other), seed=3) as strange,
        FakeEngine(config("consumer", {"allowed": [f"{mine}-*"]}, host=consumer), seed=2) as decode,
    ):
        params = stored(prefill)
        assert loaded(decode, request_of("a", PROMPT, params=params)) == 96
        assert loaded(decode, request_of("b", PROMPT, params=stored(strange))) == 0
        assert failures(decode.scheduler, "match") == {"refused": 1}
        (link,) = decode.scheduler.links
        assert link.agreement.remote.engine_id == params["remote_engine_id"]
