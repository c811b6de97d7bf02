"""Requests by the thousand, while engines at both ends abort, die and come back: nothing is lost or grows."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvplug import PeerGoneError
from kvplug.engine import RequestEnd, WorkerOutput
from kvplug_testing import waits
from kvplug_testing.contract.connector.suite import KV_OF_A_TOKEN
from kvplug_testing.contract.footprint import Footprint
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.peers import Parent, Peer
from p2p_engines import an_address, config, loaded

NUM_BLOCKS, TOKENS = 192, 41
"""Of these tokens 32 are loaded, out of three blocks."""
TIMES = {"lease_s": 1.0, "wait_timeout_s": 0.3, "stall_timeout_s": 2.0, "async_load": True}


def prompt_of(number: int) -> range:
    return range(number % 1000 * 50, number % 1000 * 50 + TOKENS)


class Lending(FakeEngine):
    """A producer that uses its blocks again once they are its own."""

    def __init__(self, host: str) -> None:
        self.lent: dict[str, tuple[int, ...]] = {}
        super().__init__(config("producer", TIMES, host=host), seed=1, num_blocks=NUM_BLOCKS)

    def lend(self, number: int) -> dict[str, Any]:
        waits.until(lambda: len(self.free_blocks) >= 6 or not self.step([]), what="blocks that come back")
        name = f"lent {number}"
        self.lent[name], params = self.hand_off(request_of(name, prompt_of(number)))
        assert params is not None
        return params

    def hear(self, report: WorkerOutput) -> None:
        super().hear(report)
        for name in report.finished_sending:
            blocks = self.lent.pop(name)
            self.cache.free(blocks)  # whoever is sent these is sent wrong KV
            self.free_blocks.extend(blocks)


def producing(parent: Parent, host: str) -> None:
    with Lending(host) as prefill:
        parent.send("up")
        while True:
            prefill.step([])
            with contextlib.suppress(TimeoutError):
                parent.send(prefill.lend(parent.recv(timeout=0.005)))


def consuming(parent: Parent, peers: list[str]) -> None:
    with reading(peers) as decode:
        parent.send("up")
        while True:
            number, params = parent.recv(timeout=None)
            loaded(decode, request_of(f"read {number}", prompt_of(number), params=params))


def reading(peers: list[str]) -> FakeEngine:
    given = config("consumer", TIMES, host=an_address("decode"), peers=peers)
    return FakeEngine(given, seed=2, num_blocks=NUM_BLOCKS)


def read(decode: FakeEngine, how: str, number: int, params: dict[str, Any]) -> str:
    """A request that is aborted, or loads. Returns how it has ended."""
    prompt = request_of(f"read {number}", prompt_of(number), params=params)
    if how == "loaded":
        return "loaded" if loaded(decode, prompt) else "computed"
    found, _ = decode.matched(prompt)
    blocks = decode.allocate(TOKENS)
    if how != "asked" and found:
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
    if how == "loading":
        decode.step([])
    planned = decode.plan([]) if how == "planned" else None
    decode.finish(prompt, blocks, RequestEnd.ABORTED)
    if planned is not None:
        decode.hear(decode.execute(planned))
    decode.settle()
    decode.free_blocks.extend(blocks)
    return f"aborted when {how}"


class Mortal:
    """A child that is killed now and then, and comes back."""

    def __init__(self, start: Callable[[], Peer]) -> None:
        self._start, self.num_deaths = start, 0
        self.peer: Peer | None = None

    def __call__(self) -> Peer:
        if self.peer is None:
            self.peer = self._start()
            assert self.peer.recv(60) == "up"
        return self.peer

    def die(self) -> None:
        if self.peer is not None:
            self.num_deaths += 1
            self.peer.close()
            self.peer = None


@pytest.fixture
def mortal(fork_server: ForkServer) -> Iterator[Callable[..., Mortal]]:
    with contextlib.ExitStack() as stack:

        def made(function: str, *args: Any) -> Mortal:
            found = Mortal(lambda: fork_server.start(f"{__file__}:{function}", *args, timeout_s=900))
            stack.callback(found.die)
            return found

        yield made


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "deaths"),
    [pytest.param(1_000, 0.01, marks=pytest.mark.full), pytest.param(10_000, 0.008, marks=pytest.mark.slow)],
)
def test_no_block_is_lost_and_nothing_grows(count: int, deaths: float, mortal: Callable[..., Mortal]) -> None:
    chance, ends = random.Random(count), Counter[str]()
    hosts = [an_address("steady"), an_address("mortal")]
    addresses = [f"{host}-0" for host in hosts]
    other_producer, other_consumer = mortal("producing", hosts[1]), mortal("consuming", addresses[:1])
    with Lending(hosts[0]) as prefill, reading(addresses) as decode:

        def request(number: int) -> None:
            if chance.random() < deaths:
                chance.choice([other_producer, other_consumer]).die()
            reader = chance.choice(["ours"] * 12 + ["other"] * 3 + ["none"])
            how = chance.choice(["asked", "allocated", "planned", "loading", *["loaded"] * 6])
            if chance.random() < 0.25:
                other_producer().send(number)
                params, reader = other_producer().recv(), "ours"
                if chance.random() < 0.03:
                    other_producer.die()
            else:
                params = prefill.lend(number)
            if reader == "ours":
                ends[read(decode, how, number, params)] += 1
            elif reader == "other":
                with contextlib.suppress(PeerGoneError):
                    other_consumer().send([number, params])
                ends["of another consumer"] += 1
            else:
                ends["unread"] += 1

        def settled() -> Footprint:
            other_producer.die()
            other_consumer.die()
            waits.until(lambda: not prefill.lent or not prefill.step([]), what="the end of all leases")
            decode.step([])
            assert len({*prefill.free_blocks}) == len({*decode.free_blocks}) == NUM_BLOCKS, "blocks are lost"
            assert prefill.worker.num_held == prefill.scheduler.num_held == 0
            return Footprint.taken()

        warm, began = count // 4, time.monotonic()
        for number in range(warm):
            request(number)
        before = settled()
        for number in range(warm, count):
            request(number)
        end = time.monotonic() + waits.patience_s  # idle threads look for their producers now and then
        while grown := (after := settled()).growth(before, count, TOKENS * KV_OF_A_TOKEN):
            assert time.monotonic() < end, grown
            time.sleep(0.1)
    took = time.monotonic() - began
    died = other_producer.num_deaths, other_consumer.num_deaths
    print(f"{count} requests in {took:.0f} s: {dict(ends)}; deaths of a producer and a consumer: {died}")
    print(f"resident: {before.resident_bytes >> 10} to {after.resident_bytes >> 10} KiB")
    assert ends["loaded"] > count / 4 and min(died) >= 2
