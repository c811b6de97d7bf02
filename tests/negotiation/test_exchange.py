"""Hello both ways and a word on what came of it, over a channel in memory."""

from __future__ import annotations

import queue
from typing import Any

import attrs
import pytest

from kvplug.errors import HandshakeError, KvplugError, PeerGoneError, TimeoutError
from kvplug.negotiation.agreement import Agreement, agree
from kvplug.negotiation.exchange import exchange
from kvplug.negotiation.hello import EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import Offer
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.wire import decode, encode, to_plain
from kvplug.transport.capabilities import Capabilities
from kvplug_testing.waits import Call

OURS = Hello(
    engine=EngineFacts(
        role="producer",
        model=ModelInfo(num_layers=30, num_kv_heads=3, head_size=64, dtype="float32", weights="w"),
        layout="KBTHD",
        block_size=16,
    ),
    checksums=("xxh3_64",),
    transports=(Offer(name="net", capabilities=Capabilities(cross_host=True)),),
    identity=PeerIdentity(boot_id="boot", pid=1),
)


def changed(hello: Hello, identity: PeerIdentity = OURS.identity, **facts: Any) -> Hello:
    """The statement of an engine with these facts."""
    assert hello.engine is not None
    return attrs.evolve(hello, identity=identity, engine=attrs.evolve(hello.engine, **facts))


THEIRS = changed(OURS, role="consumer", block_size=32, identity=PeerIdentity(boot_id="boot", pid=2))


class MemoryChannel:
    """One end of two queues of encoded values."""

    def __init__(self, peer: str, inbox: queue.Queue[bytes], outbox: queue.Queue[bytes]) -> None:
        self.peer = peer
        self._inbox, self._outbox = inbox, outbox

    def send(self, value: Any, timeout: Any = None) -> None:
        self._outbox.put(encode(value))

    def recv(self, timeout: float = 5.0) -> Any:
        try:
            data = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"{self.peer} sent nothing") from None
        if not data:
            raise PeerGoneError(f"{self.peer} is gone")
        return decode(data)

    def vanish(self) -> None:
        self._outbox.put(b"")


def channels() -> tuple[MemoryChannel, MemoryChannel]:
    first: queue.Queue[bytes] = queue.Queue()
    second: queue.Queue[bytes] = queue.Queue()
    return MemoryChannel("them", first, second), MemoryChannel("us", second, first)


def together(ours: Hello, theirs: Hello) -> list[Agreement | KvplugError]:
    """What both ends of one exchange returned or raised."""
    here, there = channels()
    calls = [
        Call(lambda: exchange(here, ours, timeout=10)),
        Call(lambda: exchange(there, theirs, timeout=10)),
    ]
    return [call.outcome() for call in calls]


def test_both_ends_get_the_agreement_that_the_pure_function_gives() -> None:
    assert together(OURS, THEIRS) == [agree(OURS, THEIRS), agree(THEIRS, OURS)]


def test_both_ends_raise_for_the_same_reasons() -> None:
    wrong = changed(THEIRS, role="producer", tensor_parallel_size=2)
    for error, peer in zip(together(OURS, wrong), ("them", "us"), strict=True):
        assert isinstance(error, HandshakeError)
        assert [it.partition(":")[0] for it in error.reasons] == ["role", "tensor_parallel_size"]
        assert peer in str(error)


def scripted(*replies: Any) -> MemoryChannel:
    """A channel whose other end has said all this already."""
    here, there = channels()
    for reply in replies:
        there.send(reply)
    return here


def test_what_only_the_peer_refuses_is_raised_here_in_its_words() -> None:
    channel = scripted({"hello": to_plain(THEIRS)}, {"refused": ["licence: expired", "odd\x1b[2Jtext"]})
    with pytest.raises(HandshakeError) as refusal:
        exchange(channel, OURS, timeout=5)
    assert refusal.value.reasons == ("licence: expired", "odd\N{REPLACEMENT CHARACTER}[2Jtext")
    assert "by the peer" in str(refusal.value)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ({"refused": []}, "gave no reason"),
        ({}, "same version of kvplug"),
        *(
            (verdict, "verdict")
            for verdict in (None, 5, {"agreed": {}}, [1], {"refused": 5}, {"refused": [None]})
        ),
    ],
)
def test_a_refusal_without_reasons_and_another_result_of_the_same_facts_are_refused(
    verdict: Any, words: str
) -> None:
    with pytest.raises(HandshakeError, match=words):
        exchange(scripted({"hello": to_plain(THEIRS)}, verdict), OURS, timeout=5)


@pytest.mark.parametrize(
    ("first", "named"),
    [
        (None, "hello: the peer sent something else"),
        ({"hello": 5}, "hello: Expected `object`"),
        ({"hello": {**to_plain(THEIRS), "padding": b"x" * (200 << 10)}}, "hello: theirs cannot be accepted"),
        ({"hello": {"deep": [[[[[[[[[1]]]]]]]]]}}, "hello: theirs cannot be accepted"),
    ],
    ids=["nothing", "no mapping", "too large", "too deep"],
)
def test_a_malformed_hello_is_refused_by_field_and_the_peer_is_told(first: Any, named: str) -> None:
    here, there = channels()
    there.send(first)
    there.vanish()
    with pytest.raises(HandshakeError) as refusal:
        exchange(here, OURS, timeout=5)
    assert any(reason.startswith(named) for reason in refusal.value.reasons)
    assert "hello" in there.recv()
    told = there.recv()["refused"]
    assert told == list(refusal.value.reasons)
