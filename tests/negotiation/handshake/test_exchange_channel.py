"""The handshake between two real processes, over the channel that is really used."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvplug.errors import HandshakeError, PeerGoneError, TimeoutError
from kvplug.negotiation.handshake.exchange import exchange
from kvplug.negotiation.handshake.hello import EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import Offer
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import this_process
from kvplug.net.trust.listener import Listener, dial
from kvplug.transport.capabilities import Capabilities
from kvplug_testing import peers
from kvplug_testing.waits import Call

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract Unix sockets"),
]

OURS = Hello(
    engine=EngineFacts(
        role="producer",
        model=ModelInfo(num_layers=30, num_kv_heads=3, head_size=64, dtype="float32", weights="w"),
        layout="KBTHD",
        block_size=16,
    ),
    checksums=("xxh3_64",),
    transports=(Offer(name="net", capabilities=Capabilities(cross_host=True)),),
    identity=this_process("parent"),
)

THEIRS = attrs.evolve(OURS.engine, role="consumer", block_size=32)


def meets(parent: peers.Parent, contact: str, change: dict[str, Any], silent: bool) -> list[str]:
    """The process at the other end: what came of its handshake."""
    with Channel(dial(contact, Credentials(), "test", 20, label="child")) as channel:
        if silent:
            parent.send("here")
            parent.recv()
        hello = attrs.evolve(OURS, engine=attrs.evolve(THEIRS, **change), identity=this_process("child"))
        try:
            found = exchange(channel, hello, timeout=20)
        except HandshakeError as e:
            return ["refused", *(reason.partition(":")[0] for reason in e.reasons)]
        return [found.transports["cpu"].chosen, str(found.checksum), *found.converts]


@contextlib.contextmanager
def met(*, silent: bool = False, **change: Any) -> Iterator[tuple[peers.Peer, Channel]]:
    with (
        Listener.open("unix:", Credentials(), "test") as listener,
        peers.start(meets, listener.contact, change, silent) as child,
        Channel(listener.accept(20)) as channel,
    ):
        yield child, channel


def test_two_processes_agree() -> None:
    with met() as (child, channel):
        found = exchange(channel, OURS, timeout=20)
        assert found.remote.identity.label == "child" and found.remote.identity.pid == child.pid
        assert found.converts == ("block_size: ours 16, theirs 32",)
        assert child.result() == ["net", "xxh3_64", "block_size: ours 32, theirs 16"]


def test_two_processes_refuse_for_the_same_reasons_and_name_each_other() -> None:
    with met(layout="BTD", role="producer") as (child, channel):
        with pytest.raises(HandshakeError, match=f"pid {child.pid}") as refusal:
            exchange(channel, OURS, timeout=20)
        assert child.result() == ["refused", *(it.partition(":")[0] for it in refusal.value.reasons)]


def test_a_peer_that_says_nothing_is_a_timeout_and_one_that_is_killed_is_gone() -> None:
    with met(silent=True) as (child, channel):
        assert child.recv() == "here"
        with pytest.raises(TimeoutError):
            exchange(channel, OURS, timeout=0.2)
        waiting = Call(lambda: exchange(channel, OURS, timeout=30))
        assert waiting.is_blocked(0.1)
        child.kill()
        waiting.raised(PeerGoneError, 10)
