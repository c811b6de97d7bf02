"""An API server is ended, or killed, in the middle of serving: its peer serves on, and finds the next one.

vLLM 0.32 calls no connector's ``shutdown`` then. On SIGTERM its front end kills the engine core and the
workers at once, and goes itself when its clients have gone. A front end that is killed leaves core and
workers behind: they go on computing, and listening, until they are ended too. Here the test does it.
"""

from __future__ import annotations

import itertools
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

WAIT_S = 120.0
"""For what takes a second, unless the machine is busy."""
START_S = 300.0
DEATHS = [signal.SIGTERM, signal.SIGKILL]


class Pair:
    """A producer's and a consumer's API server that meet on one port."""

    def __init__(self, start: Callable[[str], Any], meeting: int) -> None:
        self.meeting = meeting
        self._start = start
        self._servers = {role: start(role) for role in ("producer", "consumer")}

    def __getitem__(self, role: str) -> Any:
        self._servers[role].wait_until_ready()
        return self._servers[role]

    def replace(self, role: str) -> None:
        self._servers[role] = self._start(role)


@pytest.fixture(scope="module")
def pair(model: str, servers: Any, config_for: Any, free_port: Any) -> Iterator[Pair]:
    meeting = free_port()
    with ExitStack() as stack:

        def start(role: str) -> Any:
            config = config_for(f"kv_{role}", meeting, kv_load_failure_policy="recompute")
            return stack.enter_context(servers.Server(model, config, free_port(), START_S))

        yield Pair(start, meeting)


def until(holds: Callable[[], Any], what: str, instead: Callable[[], Any] = lambda: "") -> None:
    limit = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < limit, f"it did not come to this: {what} {instead()}"
        time.sleep(0.1)


def loads(pair: Pair, prompt: list[int], tokens: tuple[int, ...]) -> None:
    """The consumer's answers are right, and, in a while at least, they are made with the producer's KV."""
    before = pair["consumer"].transfers("load")

    def loaded() -> bool:
        salt = uuid.uuid4().hex  # or the consumer would have it itself
        assert pair["producer"].complete(prompt, max_tokens=1, salt=salt) == tokens[:1]
        assert pair["consumer"].complete(prompt, salt=salt) == tokens
        return bool(pair["consumer"].transfers("load") > before)

    until(loaded, "the consumer loads what the producer has saved")


def dies(pair: Pair, role: str, how: signal.Signals, prompt: list[int], tokens: tuple[int, ...]) -> None:
    """In the middle of serving. Nothing is left of what it held, nor of itself; the next one is started."""
    server = pair[role]
    held = server.holdings()
    if role == "producer":
        assert pair.meeting in held.ports
        assert any(name.startswith("@kvplug") for name in held.names)
    with closing(server.stream(prompt, max_tokens=1500)) as answer:
        assert sum(itertools.islice(answer, 2), ()) == tokens[:2]
        server.send_signal(how)
        if how is signal.SIGKILL:
            until(lambda: not server.runs, "it is killed")
        else:
            until(lambda: len(held.left()) <= 2, "only the front end and its helper are left:", held.left)
    if how is signal.SIGKILL:
        server.reap()
    until(lambda: not server.runs, "it has ended")
    until(lambda: not held.left(), "nothing is left:", held.left)
    pair.replace(role)


@pytest.mark.parametrize("how", DEATHS, ids=lambda number: number.name)
def test_a_consumer_serves_on_without_its_producer_and_finds_the_next_one(
    how: signal.Signals, pair: Pair, prompts: Any, alone: Any
) -> None:
    loads(pair, prompts[300], alone[300])
    pair["producer"].complete(prompts[700], max_tokens=1, salt="stored, and never loaded")
    with closing(pair["consumer"].stream(prompts[100], max_tokens=200)) as answer:
        tokens = next(answer)
        dies(pair, "producer", how, prompts[300], alone[300])
        tokens += sum(answer, ())
    assert len(tokens) == 200
    assert tokens[:16] == alone[100]
    assert pair["consumer"].complete(prompts[700], salt="stored, and never loaded") == alone[700]
    assert pair["consumer"].complete(prompts[300], salt=uuid.uuid4().hex) == alone[300]
    loads(pair, prompts[300], alone[300])


@pytest.mark.parametrize("how", DEATHS, ids=lambda number: number.name)
def test_a_producer_serves_on_without_its_consumer_and_serves_the_next_one(
    how: signal.Signals, pair: Pair, prompts: Any, alone: Any
) -> None:
    loads(pair, prompts[300], alone[300])
    with closing(pair["producer"].stream(prompts[100], max_tokens=200)) as answer:
        tokens = next(answer)
        dies(pair, "consumer", how, prompts[300], alone[300])
        tokens += sum(answer, ())
    assert len(tokens) == 200
    assert tokens[:16] == alone[100]
    assert pair["producer"].complete(prompts[700], salt=uuid.uuid4().hex) == alone[700]
    loads(pair, prompts[300], alone[300])
