"""The connector "lookup" between real processes, one of which dies, stops or goes away in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvplug import Config
from kvplug.engine import RequestEnd
from kvplug_testing import peers
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.faults import FaultyPipe, Plan, Rule
from kvplug_testing.forkserver import ForkServer

pytestmark = pytest.mark.timeout(90)

TIMEOUT_S = 10.0
STALL_S = 2.0
BASE: dict[str, Any] = {"connector": "lookup", "timeout_s": TIMEOUT_S, "connect_timeout_s": 20}
PROMPT = range(100)
LARGE = 4096


def prefill_worker(parent: Any, rules: list[dict[str, Any]]) -> None:
    """Stores the prompt, hands out the contact, serves until told to end."""
    config = Config.from_dict({**BASE, "role": "producer"})
    plan = Plan(rules=[Rule(**rule) for rule in rules])
    with FakeEngine(config, listen="unix:", wrap_pipe=lambda pipe: FaultyPipe(pipe, plan)) as prefill:
        prefill.prefill(request_of("stored", PROMPT))
        parent.send(prefill.worker.contact)
        parent.recv(timeout=60)


def decode_worker(parent: Any, contact: str, number: int) -> None:
    """Loads the prompt, and dies when the n-th layer has come; with -1 it lives."""
    config = Config.from_dict({**BASE, "role": "consumer"})
    with FakeEngine(config, connect=contact, seed=2) as decode:
        if number >= 0:

            def die(*_: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            import kvplug_lookup.connector.load as load

            load.Load.layer = die  # type: ignore[method-assign]
        prompt = request_of("a", PROMPT)
        blocks, loaded, report = decode.load(prompt)
        right = decode.is_right(prompt.token_ids, blocks, 100)
        parent.send((loaded, len(report.invalid_block_ids), right))


@contextlib.contextmanager
def engine(contact: str, **options: Any) -> Iterator[FakeEngine]:
    config = Config.from_dict({**BASE, "role": "consumer", "options": {"lookup": options}})
    with FakeEngine(config, connect=contact, seed=2) as decode:
        yield decode


def promise(decode: FakeEngine, name: str = "a") -> Any:
    """A request for which a load was promised, its blocks, and how much."""
    prompt = request_of(name, PROMPT)
    found, _ = decode.matched(prompt)
    assert found == 96
    blocks = decode.allocate(100)
    decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
    return prompt, blocks, found, 4


def before_layer(number: int, signal: str) -> list[dict[str, Any]]:
    """A rule: what sends the n-th large tensor is sent this signal before it does."""
    return [{"do": "kill", "signal": signal, "message": number, "min_bytes": LARGE}]


@pytest.mark.parametrize(
    "number", [1, pytest.param(4, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.full)]
)
def test_a_producer_killed_while_it_sends_is_a_load_error_at_once(
    fork_server: ForkServer, number: int
) -> None:
    with (
        peers.nothing_left(),
        fork_server.start(f"{__file__}:prefill_worker", before_layer(number, "SIGKILL")) as child,
    ):
        with engine(child.recv()) as decode:
            scheduled = promise(decode)
            begun = time.monotonic()
            report = decode.step([scheduled])
            assert report.invalid_block_ids == frozenset(scheduled[1][:6])
            assert time.monotonic() - begun < TIMEOUT_S
            assert decode.figures()["failures"]["load"] == {"peer_gone": 1}
            # the engine computes the prompt itself, and nothing more is promised
            prompt, blocks, *_ = scheduled
            decode.step([(prompt, blocks, 0, 100)])
            assert decode.is_right(prompt.token_ids, blocks, 100)
            assert decode.matched(request_of("b", PROMPT)) == (0, False)
        child.wait()


def test_a_producer_that_is_stopped_while_it_sends_is_a_load_error_as_soon_as_it_has_stalled(
    fork_server: ForkServer,
) -> None:
    with (
        peers.nothing_left(),
        fork_server.start(f"{__file__}:prefill_worker", before_layer(3, "SIGSTOP")) as child,
    ):
        with engine(child.recv(), stall_timeout_s=STALL_S) as decode:
            scheduled = promise(decode)
            begun = time.monotonic()
            report = decode.step([scheduled])
            assert report.invalid_block_ids == frozenset(scheduled[1][:6])
            assert STALL_S < time.monotonic() - begun < TIMEOUT_S / 2
            assert decode.figures()["failures"]["load"] == {"stalled": 1}
            # the next request does not pay for it again
            assert decode.matched(request_of("next", PROMPT)) == (0, False)
            # what arrives late, once it goes on, touches no block any more
            prompt, blocks, *_ = scheduled
            decode.step([(prompt, blocks, 0, 100)])
            child.cont()
            time.sleep(0.5)
            assert decode.is_right(prompt.token_ids, blocks, 100)
            # and it is good for loads again
            again = promise(decode, "again")
            assert not decode.step([again]).invalid_block_ids
            assert decode.is_right(again[0].token_ids, again[1], 100)
        child.send("end")
        child.wait()


def test_a_consumer_killed_while_it_receives_leaves_the_entry_to_the_next(fork_server: ForkServer) -> None:
    with peers.nothing_left(), fork_server.start(f"{__file__}:prefill_worker", []) as prefill:
        contact = prefill.recv()
        with fork_server.start(f"{__file__}:decode_worker", contact, 0) as first:
            first.wait()
            assert first.exit_code == -signal.SIGKILL
        with fork_server.start(f"{__file__}:decode_worker", contact, -1) as second:
            assert second.recv() == (96, 0, True)
            second.result()
        prefill.send("end")
        prefill.wait()


def test_a_producer_that_comes_back_is_found_again() -> None:
    address = f"unix:@kvplug-test-{os.getpid()}-comes-back"
    base = {**BASE, "host": address}
    consumer = Config.from_dict({**base, "role": "consumer"})
    with peers.nothing_left():
        with FakeEngine(Config.from_dict({**base, "role": "producer"})) as prefill:
            prefill.prefill(request_of("stored", PROMPT))
            decode = FakeEngine(consumer, seed=2)
            assert decode.matched(request_of("a", PROMPT)) == (96, False)
        with decode:
            deadline = time.monotonic() + 20
            while decode.matched(request_of(f"b{time.monotonic()}", PROMPT))[0] != 0:
                assert time.monotonic() < deadline
            with FakeEngine(Config.from_dict({**base, "role": "producer"})) as prefill:
                prefill.prefill(request_of("stored", PROMPT))
                while decode.matched(request_of(f"c{time.monotonic()}", PROMPT))[0] != 96:
                    assert time.monotonic() < deadline
                prompt = request_of("d", PROMPT)
                blocks, loaded, report = decode.load(prompt)
                assert loaded == 96 and not report.invalid_block_ids
                assert decode.is_right(prompt.token_ids, blocks, 100)
                decode.scheduler.request_finished(prompt, (blocks,), RequestEnd.FINISHED)
