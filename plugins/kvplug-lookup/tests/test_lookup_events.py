"""The events about an engine's blocks: published in vLLM's format, and printed by ``kvplug events``."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import msgspec
import pytest
import zmq
from click.testing import CliRunner

from kvplug import ConfigError, KvplugError
from kvplug_lookup.connector.publisher import EventPublisher
from kvplug_lookup.events_command import events
from kvplug_testing import limits
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call, until
from lookup_engines import PROMPT, an_address, both, config, num_held, tokens

pytestmark = pytest.mark.timeout(60)

ADDRESSES = {"events": "tcp://127.0.0.1:*", "events_replay": "tcp://127.0.0.1:*"}


class Subscriber:
    """A program that listens, from before the first event on."""

    def __init__(self, engine: FakeEngine) -> None:
        publisher = engine.scheduler.publisher
        self.address, self.replay = publisher.address, publisher.replay_address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(self.address)
        self.numbers: list[int] = []

    def wait_until_joined(self, engine: FakeEngine) -> None:
        """A subscription takes a moment to arrive: publish until something comes."""

        def has_come() -> bool:
            engine.scheduler.publisher.publish([])
            return bool(self._socket.poll(20))

        until(has_come, what="the first batch")
        while self._socket.poll(300):
            self._take()

    def _take(self) -> list[Any]:
        topic, number, payload = self._socket.recv_multipart()
        assert topic == b""
        self.numbers.append(int.from_bytes(number, "big"))
        when, found, rank = msgspec.msgpack.decode(payload)
        assert abs(when - time.time()) < 60 and rank == 0
        return found  # type: ignore[no-any-return]

    def take(self, count: int) -> list[Any]:
        """The next events, at least so many."""
        found: list[Any] = []

        def are_here() -> bool:
            while self._socket.poll(10):
                found.extend(self._take())
            return len(found) >= count

        until(are_here, what=f"{count} events")
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def publishing(**given: Any) -> Iterator[tuple[FakeEngine, Subscriber]]:
    with both(ADDRESSES, **given) as engine:
        subscriber = Subscriber(engine)
        try:
            subscriber.wait_until_joined(engine)
            yield engine, subscriber
        finally:
            subscriber.close()


def hashed(name: str, token_ids: Any, **given: Any) -> Any:
    """A request whose engine has hashes of its blocks."""
    prompt = request_of(name, token_ids, **given)
    hashes = tuple(f"hash {number} of {name}".encode() for number in range(len(prompt.token_ids) // 16))
    return attrs.evolve(prompt, block_hashes=hashes, adapter="a lora")


def test_blocks_are_published_with_the_engines_own_hashes_in_vllms_format() -> None:
    options = {"host": {"size": 1 << 20, "segment_bytes": 1 << 18}}
    with publishing(options=options) as (engine, subscriber):
        prompt = hashed("a", PROMPT)
        engine.free_blocks.extend(engine.prefill(prompt))
        stored = sorted(subscriber.take(6), key=lambda event: event["token_ids"])
        assert [event["block_hashes"] for event in stored] == [[each] for each in prompt.block_hashes]
        for number, event in enumerate(stored):
            (chain,) = event.pop("kvplug_chains")
            assert len(chain) == 32
            assert event == {
                "type": "BlockStored",
                "block_hashes": [prompt.block_hashes[number]],
                "parent_block_hash": prompt.block_hashes[number - 1] if number else None,
                "token_ids": list(PROMPT[16 * number : 16 * number + 16]),
                "block_size": 16,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": "a lora",
                "group_idx": 0,
                "locality": "LOCAL",
                "ownership": "host",
            }
        for number in range(1, 40):
            blocks = engine.prefill(request_of(f"p{number}", tokens(100, first=1000 * number)))
            engine.free_blocks.extend(blocks)
        num_held(engine)
        gone: set[bytes] = set()

        def are_gone() -> bool:
            for event in subscriber.take(1):
                if event["type"] == "BlockRemoved":
                    assert (event["medium"], event["ownership"], event["group_idx"]) == ("CPU", "host", 0)
                    gone.update(event["block_hashes"])
            return gone.issuperset(prompt.block_hashes)

        until(are_gone, what="the removal of the first prompt's blocks")
        assert engine.scheduler.reset_cache()
        engine.step([])
        until(lambda: {"type": "AllBlocksCleared"} in subscriber.take(1))
        assert subscriber.numbers == [*range(subscriber.numbers[0], subscriber.numbers[-1] + 1)]


def test_kvplug_events_prints_earlier_and_later_events() -> None:
    with publishing() as (engine, subscriber):
        prompt = hashed("a", PROMPT)
        engine.prefill(prompt)
        subscriber.take(6)
        given = [subscriber.address, "--replay", subscriber.replay, "--timeout", "20", "--count", "9"]
        printing = Call(lambda: CliRunner().invoke(events, [*given, "--json"], catch_exceptions=False))
        assert printing.is_blocked(0.5)
        later = hashed("b", tokens(64, first=5000))
        engine.prefill(later)
        result = printing.result()
        assert result.exit_code == 0
        printed = [json.loads(line) for line in result.output.splitlines()]
        expected = {each.hex() for each in (*prompt.block_hashes, *later.block_hashes)}
        assert {each["block_hashes"][0] for each in printed} <= expected and len(printed) == 9
        assert [each["seq"] for each in printed] == sorted(each["seq"] for each in printed)
        assert printed[0]["ownership"] == "host" and len(printed[0]["kvplug_chains"]) == 1

        short = CliRunner().invoke(events, [*given[:-1], "2"], catch_exceptions=False)
        assert "BlockStored" in short.output and "16 tokens" in short.output


def printed(*given: str) -> Any:
    """What the command printed, and how it ended."""
    return CliRunner().invoke(events, list(given))


def shown(parts: list[bytes], *given: str) -> Any:
    """What the command does with a message that is published again and again."""
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.linger = 0
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        call = Call(lambda: printed(f"127.0.0.1:{port}", "--timeout", "20", *given))
        while call.is_blocked(0.05):
            publisher.send_multipart(parts)
        return call.result()


def batch(*found: Any, at: Any = 1.5) -> list[bytes]:
    return [b"", bytes(8), msgspec.msgpack.encode([at, list(found), 0])]


def nested(depth: int) -> bytes:
    return (
        msgspec.msgpack.encode([1.5, [{"type": "BlockStored", "x": None}]])[:-1] + b"\x91" * depth + b"\xc0"
    )


@pytest.mark.parametrize(
    "parts",
    [
        [b"one part"],
        [b"", b"short", batch()[2]],
        [b"", bytes(8), msgspec.msgpack.encode({})],
        [b"", bytes(8), nested(100_000)],
        batch(["BlockStored", ["\x1b[31m"]]),
        batch({"type": "BlockStored", "block_hashes": ["text\x1b[31m"]}),
        batch({"type": "BlockStored"}, at=1e300),
        batch({"type": "BlockStored"}, at=float("nan")),
    ],
)
def test_a_malformed_batch_of_events_is_reported_in_one_line(parts: list[bytes]) -> None:
    for given in ((), ("--json",)):
        result = shown(parts, *given)
        assert type(result.exception) is KvplugError and str(result.exception).isprintable()
        assert "is not a batch of events" in str(result.exception) and not result.output


def test_events_reach_a_terminal_as_printable_text() -> None:
    evil = "\x1b[31mB\x07\n\x9b\x7f"
    parts = batch({"type": evil, "medium": evil, "ownership": evil, evil: {b"\x1b": [b"\x1b", evil]}})
    for given in ((), ("--json",)):
        (line,) = shown(parts, "--count", "1", *given).output.splitlines()
        assert line.isprintable()


def test_kvplug_events_reports_that_no_process_listens() -> None:
    result = printed("127.0.0.1:1", "--timeout", "0.2")
    assert str(result.exception) == "nothing listens at tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:99999", "*:5557", "tcp://:1", "http://h:1", "a:b"]
)
def test_a_malformed_address_of_a_publisher_is_refused_with_the_right_form(address: str) -> None:
    for given in ((address,), ("127.0.0.1:1", "--replay", address)):
        error = str(printed(*given).exception)
        assert error.startswith(repr(address)) and "give HOST:PORT" in error


def test_an_engine_that_publishes_events_itself_receives_them() -> None:
    given = config("producer", {"events": "engine"}, host=an_address("events"))
    with FakeEngine(given) as prefill:
        taken: list[Any] = []
        take = prefill.scheduler.take_events
        prefill.scheduler.take_events = lambda: taken.extend(take()) or []
        prompt = hashed("a", PROMPT)
        prefill.prefill(prompt)
        until(lambda: prefill.step([]) and len(taken) == 6, what="the events of six blocks")
        assert {event.block_hashes[0] for event in taken} == set(prompt.block_hashes)


def test_a_publisher_that_cannot_start_a_thread_releases_its_address() -> None:
    first = EventPublisher("tcp://127.0.0.1:0")
    first.close()
    with limits.threads(0), pytest.raises(RuntimeError):
        EventPublisher(first.address, "tcp://127.0.0.1:*")
    EventPublisher(first.address).close()


@pytest.mark.parametrize("name", ["events", "events_replay"])
@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5557", "tcp://*:5557", "tcp://10.0.0.1:5557", "in use"])
def test_events_are_not_shown_to_other_hosts_or_at_an_address_in_use(name: str, address: str) -> None:
    said = "cannot be bound" if address == "in use" else "allow_unauthenticated_data_plane"
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}" if address == "in use" else address
        with pytest.raises(ConfigError, match=said):
            FakeEngine(config("producer", {**ADDRESSES, name: address}), listen="unix:")
