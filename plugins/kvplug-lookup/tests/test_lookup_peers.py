"""Several peer engines: each joins, fails, stops, leaves and comes back, and the others go on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvplug_lab.faults import FaultyPipe, Rule
from kvplug_lookup.connector import serve
from kvplug_testing import peers
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.waits import Call, until
from lookup_engines import (
    PROMPT,
    an_address,
    assert_loads,
    config,
    failures,
    num_held,
    pair,
    promised,
    tokens,
    until_promised,
)

pytestmark = pytest.mark.timeout(90)


def producing(parent: Any, address: str, firsts: list[int], count: int = 100, rules: Any = ()) -> None:
    """An engine that has saved prompts of so many tokens, and serves them until it receives the end.

    ``rules``: of the faults of its pipes; with any, its memory is not mapped.
    """
    options = {"host": {"segment_bytes": 1 << 20, "map": not rules}}
    given_rules = [Rule.parsed(rule) for rule in rules]
    given = config("producer", host=address, options=options, transport="cpu" if rules else "auto")
    with FakeEngine(given, num_blocks=256, wrap_pipe=lambda pipe: FaultyPipe(pipe, given_rules)) as engine:
        for first in firsts:
            engine.prefill(request_of(f"stored {first}", tokens(count, first)))
        num_held(engine)
        parent.send(engine.worker.contact)
        parent.recv(timeout=80)


@pytest.fixture
def start(fork_server: ForkServer) -> Iterator[Callable[..., peers.Peer]]:
    """Starts producers in other processes, at these addresses."""
    with contextlib.ExitStack() as stack:

        def start(address: str, firsts: list[int], *more: Any) -> peers.Peer:
            child: peers.Peer = stack.enter_context(
                fork_server.start(f"{__file__}:producing", address, firsts, *more, timeout_s=90)
            )
            child.recv()
            return child

        yield start


@contextlib.contextmanager
def consumer(*addresses: str, seed: int = 2, **more: Any) -> Iterator[FakeEngine]:
    with FakeEngine(
        config("consumer", peers=[f"{each}-0" for each in addresses], **more), seed=seed, num_blocks=256
    ) as decode:
        yield decode


def test_one_load_takes_its_pages_from_several_peers(start: Any) -> None:
    short, long = an_address("short"), an_address("long")
    start(short, [0], 50)
    with consumer(short, long) as decode:
        until_promised(decode, PROMPT, 48)
        start(long, [0], 100)
        until_promised(decode, PROMPT, 96)
        numbers = itertools.count()

        def is_shared() -> bool:  # a peer that answers late is left out where another has the pages
            assert_loads(decode, request_of(f"a {next(numbers)}", PROMPT), 96)
            first, _, second = decode.worker.last_route.partition("; ")
            return first.startswith(f"peer {short}-0") and second.startswith(f"peer {long}-0")

        until(is_shared, what="a load of pages of both")


def test_a_peer_that_is_killed_in_the_middle_of_a_load_fails_its_own_pages_only(start: Any) -> None:
    address, other = an_address("killed"), an_address("other")
    start(address, [0], 100, ["kill message=1 min_bytes=4096"])
    start(other, [1000])
    given = {"options": {"host": {"map": False}}, "transport": "cpu"}
    with consumer(address, other, **given) as decode:
        until_promised(decode, PROMPT, 96)
        until_promised(decode, tokens(100, 1000), 96)
        lost = promised(decode, request_of("a", PROMPT), 96)
        kept = promised(decode, request_of("b", tokens(100, 1000)), 96)
        report = Call(lambda: decode.step([lost, kept])).result(8)
        assert report.invalid_block_ids and report.invalid_block_ids <= frozenset(lost[1])
        assert decode.is_right(kept[0].token_ids, kept[1], 100)
        assert set(failures(decode, "load")) <= {"store_gone", "peer_gone"}
        decode.step([(lost[0], lost[1], 0, 100)])
        assert decode.is_right(lost[0].token_ids, lost[1], 100)
        until_promised(decode, PROMPT, 0)


# -- followers -----------------------------------------------------------------------------------


def test_a_store_of_more_pages_than_a_follower_may_lag_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_MAX_LAG_BYTES", 300)
    with FakeEngine(config("producer"), listen="unix:", num_blocks=256) as prefill:
        for number in range(10):
            prefill.prefill(request_of(f"p{number}", tokens(100, first=1000 * number)))
        num_held(prefill)
        with FakeEngine(config("consumer"), connect=prefill.worker.contact) as decode:
            decode.scheduler.wait_until_ready(5)
            assert decode.matched(request_of("a", PROMPT)) == (96, False)


def test_peers_beyond_the_most_that_are_served_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_MAX_SERVED", 2)
    with pair() as (prefill, decode):
        decode.worker.wait_until_ready(10)
        decode.scheduler.wait_until_ready(10)
        with FakeEngine(config("consumer"), connect=prefill.worker.contact) as other:
            assert Call(lambda: other.scheduler.wait_until_ready(10)).is_blocked(0.5)
        prefill.prefill(request_of("stored", PROMPT))
        assert_loads(decode, request_of("a", PROMPT), 96)


@pytest.mark.parametrize("odd", [5, {"ping": "x"}, {}, None])
def test_a_follower_that_sends_malformed_messages_is_disconnected(odd: Any) -> None:
    with pair() as (prefill, decode):
        decode.scheduler.wait_until_ready(10)
        (replica,) = decode.scheduler.replicas
        link = replica.link
        link.channel.send(odd, timeout=5)
        until(lambda: replica.link not in (None, link), what="a new connection")
        prefill.prefill(request_of("stored", PROMPT))
        until_promised(decode, PROMPT, 96)
