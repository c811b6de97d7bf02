"""An API server is ended, or killed, in the middle of serving: its peer serves on, and finds the next one.

vLLM 0.32 calls no connector's ``shutdown`` then. On SIGTERM its front end kills the engine core and the
workers at once, and goes itself when its clients have gone. A front end that is killed leaves core and
workers behind: they go on computing, and listening, until they are ended too. Here the test does it.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from kvplug_testing.waits import until
from vllm_engines import transfer_config
from vllm_servers import Server, new_salt

pytestmark = pytest.mark.timeout(900)

WAIT_S = 120.0
"""For what takes a second, unless the machine is busy."""
ROLES = ("producer", "consumer")


class Pair:
    """A producer's and a consumer's API server that meet on one port."""

    def __init__(self, start: Callable[[str], Server], meeting: int) -> None:
        self.meeting = meeting
        self.start = start
        self.servers = {role: start(role) for role in ROLES}

    def __getitem__(self, role: str) -> Server:
        self.servers[role].wait_until_ready()
        return self.servers[role]


@pytest.fixture(scope="module")
def pair(model: str, free_port) -> Iterator[Pair]:
    meeting = free_port()
    with ExitStack() as stack:

        def start(role: str) -> Server:
            config = transfer_config(f"kv_{role}", meeting, kv_load_failure_policy="recompute")
            return stack.enter_context(Server(model, config, free_port()))

        yield Pair(start, meeting)


def loads(pair: Pair, prompt: list[int], tokens: tuple[int, ...]) -> None:
    """The consumer's answers are right, and, in a while at least, they are made with the producer's KV."""
    before = pair["consumer"].transfers("load")

    def loaded() -> bool:
        salt = new_salt()  # or the consumer would have it itself
        assert pair["producer"].complete(prompt, max_tokens=1, salt=salt).tokens == tokens[:1]
        assert pair["consumer"].complete(prompt, salt=salt).tokens == tokens
        return bool(pair["consumer"].transfers("load") > before)

    until(loaded, WAIT_S, "a load of what the producer has saved")


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
            until(lambda: not server.runs, WAIT_S, "its death")
        else:
            until(lambda: len(held.left()) <= 2, WAIT_S, "the end of all but the front end and its helper")
    if how is signal.SIGKILL:
        server.kill()
    until(lambda: not server.runs, WAIT_S, "its end")
    until(lambda: not held.left(), WAIT_S, "the end of what it held")
    pair.servers[role] = pair.start(role)


@pytest.mark.parametrize(
    ("role", "how"),
    [("producer", signal.SIGTERM), ("producer", signal.SIGKILL), ("consumer", signal.SIGKILL)],
    ids=str,
)
def test_a_server_serves_on_without_its_peer_and_finds_the_next_one(role, how, pair, prompts, alone):
    other = "consumer" if role == "producer" else "producer"
    loads(pair, prompts[300], alone[300])
    never_loaded = new_salt()
    pair["producer"].complete(prompts[700], max_tokens=1, salt=never_loaded)
    with closing(pair[other].stream(prompts[100], max_tokens=200)) as answer:
        tokens = next(answer)
        dies(pair, role, how, prompts[300], alone[300])
        tokens += sum(answer, ())
    assert len(tokens) == 200
    assert tokens[:16] == alone[100]
    assert pair[other].complete(prompts[700], salt=never_loaded).tokens == alone[700]
    assert pair[other].complete(prompts[300], salt=new_salt()).tokens == alone[300]
    loads(pair, prompts[300], alone[300])
