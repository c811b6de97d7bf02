"""Either engine is killed or stopped: before a claim, between claim and pull, and in the middle of a pull."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, PlannedStep, request_of
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.pairs import PipeAround
from kvplug_testing.peers import Parent, Peer
from kvplug_testing.waits import Call
from p2p_engines import an_address, config, failures, failures_of, loaded, stored, until_named

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("fork_server", "nothing_left")]

PROMPT = range(4001)
"""Its KV is 1.5 MB: more than waits in a socket."""
BLOCKS = {"num_blocks": 600}
TIMES = {"wait_timeout_s": 0.5, "stall_timeout_s": 1.0}
SLACK_S = 3.0
"""How much later something may happen, since the processor is busy."""
POINTS = ["before", "claimed", "pulling"]


@pytest.fixture(autouse=True, scope="module")
def _torch_has_its_threads() -> None:
    torch.ones(1 << 22).add(1)


class HeldPipe(PipeAround):
    """Calls ``hold`` before it receives anything large: its peer is in the middle of sending then."""

    def __init__(self, pipe: Any, hold: Any) -> None:
        super().__init__(pipe)
        self._hold = hold

    def _receive_tensor(self, out: Any, timeout: Any) -> Any:
        self._hold()
        return super()._receive_tensor(out, timeout)


def producing(parent: Parent, host: str, lease_s: float) -> None:
    """A producer that steps until it is told to leave."""
    with FakeEngine(config("producer", {"lease_s": lease_s}, host=host), seed=1, **BLOCKS) as prefill:
        parent.send("up")
        while True:
            prefill.step([])
            with contextlib.suppress(TimeoutError):
                match parent.recv(timeout=0.01):
                    case "leave":
                        return
                    case "held":
                        parent.send(prefill.worker.num_held)
                    case name:
                        parent.send(stored(prefill, name, PROMPT))


def consuming(parent: Parent, host: str, is_held: bool) -> None:
    """A consumer that claims the blocks of references, and loads them."""

    def hold() -> None:
        if is_held:
            parent.send("pulling")
            time.sleep(1.0)

    given = config("consumer", TIMES, host=host)
    with FakeEngine(given, seed=2, wrap_pipe=lambda pipe: HeldPipe(pipe, hold), **BLOCKS) as decode:
        decode.scheduler.wait_until_ready(20)
        decode.worker.wait_until_ready(20)
        parent.send("up")
        while True:
            what, params = parent.recv(timeout=80)
            prompt = request_of("a", PROMPT, params=params)
            if what == "leave":
                return
            parent.send(decode.matched(prompt)[0] if what == "claim" else loaded(decode, prompt))


@contextlib.contextmanager
def child(server: ForkServer, function: str, *args: Any) -> Iterator[Peer]:
    with server.start(f"{__file__}:{function}", *args, timeout_s=85) as peer:
        assert peer.recv(60) == "up"
        yield peer


def end(peer: Peer, how: str) -> None:
    peer.kill() if how == "killed" else peer.stop()


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("point", POINTS)
def test_a_producer_that_ends_fails_a_load_in_time(point: str, how: str, fork_server: ForkServer) -> None:
    host, lease_s = an_address(), 2.0
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        if point == "pulling" and not go.is_set():
            begun.set()
            go.wait(20)

    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(child(fork_server, "producing", host, lease_s))
        given = config("consumer", TIMES, host=host)
        decode = stack.enter_context(
            FakeEngine(given, seed=2, wrap_pipe=lambda pipe: HeldPipe(pipe, hold), **BLOCKS)
        )
        decode.scheduler.wait_until_ready(20)
        decode.worker.wait_until_ready(20)
        producer.send("stored")
        prompt = request_of("a", PROMPT, params=producer.recv())
        if point != "before":
            assert decode.matched(prompt) == (4000, False)
        if point == "pulling":
            load = Call(lambda: loaded(decode, prompt))
            waits.until(lambda: begun.is_set() or load.ended, what="a pull")
        end(producer, how)
        go.set()
        if point != "pulling":
            load = Call(lambda: loaded(decode, prompt))
        assert load.result() == 0
        assert load.took_s < TIMES["wait_timeout_s"] + TIMES["stall_timeout_s"] + SLACK_S
        found = {**failures(decode.scheduler, "match"), **failures_of(decode, "load")}
        assert found and found.keys() <= {"peer_gone", "timeout", "stalled"}, found
        if how == "killed":
            producer = stack.enter_context(child(fork_server, "producing", host, lease_s))
        producer.cont()
        if how == "stopped":
            producer.send("held")
            waits.until(
                lambda: is_zero(producer), lease_s + SLACK_S, what="the blocks of a lease that is over"
            )
        decode.scheduler.wait_until_ready(20)
        producer.send("again")
        assert loaded(decode, request_of("b", PROMPT, params=producer.recv())) == 4000


def is_zero(producer: Peer) -> bool:
    """Whether it holds nothing. It was asked."""
    if not (held := producer.recv()):
        return True
    producer.send("held")
    assert held == 1
    return False


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("point", POINTS)
def test_a_consumer_that_ends_gives_the_blocks_back(point: str, how: str, fork_server: ForkServer) -> None:
    """At once when it has died and had a claim, else when the lease is over."""
    host, at_once = an_address(), how == "killed" and point != "before"
    lease_s = 40.0 if at_once else 1.0
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(
            FakeEngine(config("producer", {"lease_s": lease_s}, host=host), seed=1, **BLOCKS)
        )
        consumer = stack.enter_context(child(fork_server, "consuming", host, point == "pulling"))
        params = stored(prefill, "stored", PROMPT)
        if point == "claimed":
            consumer.send(["claim", params])
            assert consumer.recv() == 4000
        if point == "pulling":
            consumer.send(["load", params])
            assert consumer.recv() == "pulling"
        began = time.monotonic()
        end(consumer, how)
        until_named(prefill, "stored", within=(0 if at_once else lease_s) + SLACK_S)
        assert at_once or time.monotonic() - began > lease_s / 2, "they came back before the lease was over"
        prefill.cache.free(range(600))
        if how == "stopped":
            consumer.cont()
            if point != "pulling":
                consumer.send(["load", params])
            assert answer_of(consumer) == 0, "it has loaded from blocks that were given back"
            consumer.send(["load", stored(prefill, "again", PROMPT)])
            assert answer_of(consumer) == 4000
            consumer.send(["leave", None])
            consumer.result()


def working(parent: Parent, given: dict[str, Any]) -> None:
    """A consumer's worker, whose scheduler side is in another process."""

    def hold() -> None:
        parent.send("pulling")
        time.sleep(1.0)

    with FakeEngine(
        config("consumer", **given), seed=2, wrap_pipe=lambda pipe: HeldPipe(pipe, hold), **BLOCKS
    ) as engine:
        parent.send("up")
        while (metadata := parent.recv(timeout=80)) is not None:
            step = PlannedStep(scheduled=(), preempted=frozenset(), metadata=metadata)
            report = engine.execute(step)
            parent.send([[*report.finished_recving], [*report.invalid_block_ids]])


def test_a_workers_hang_gives_the_blocks_back_though_its_scheduler_lives(fork_server: ForkServer) -> None:
    """It is stopped in the middle of a pull. When it goes on, the load has failed."""
    host, lease_s, timeout_s = an_address(), 1.0, 3.0
    given = {
        "host": host,
        "engine_id": "decode",
        "timeout_s": timeout_s,
        "p2p": {**TIMES, "async_load": True},
    }
    producer = config("producer", {"lease_s": lease_s}, host=host)
    with (
        FakeEngine(producer, seed=1, **BLOCKS) as prefill,
        child(fork_server, "working", given) as worker,
        FakeEngine(config("consumer", **given), seed=2, **BLOCKS) as decode,
    ):
        decode.scheduler.wait_until_ready(20)
        prompt = request_of("a", PROMPT, params=stored(prefill, "stored", PROMPT))
        assert decode.matched(prompt) == (4000, True)
        blocks = decode.allocate(4001)
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), 4000)
        worker.send(decode.plan([]).metadata)
        assert answer_of(worker) == [[], []]
        worker.stop()
        until_named(prefill, "stored", within=timeout_s + lease_s + SLACK_S)
        prefill.cache.free(range(600))
        worker.cont()
        received: list[str] = []
        while not received:
            worker.send(decode.plan([]).metadata)
            received, invalid = answer_of(worker)
        assert received == ["a"] and {*invalid} == {*blocks[:250]}
        worker.send(None)
        worker.result()


def answer_of(peer: Peer) -> Any:
    """What it says, but for "pulling"."""
    while (said := peer.recv()) == "pulling":
        pass
    return said
