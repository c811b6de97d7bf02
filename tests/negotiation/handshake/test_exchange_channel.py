"""The handshake between two real processes, over the channel that is really used."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from kvplug.errors import HandshakeError, PeerGoneError, TimeoutError
from kvplug.negotiation.handshake.exchange import exchange
from kvplug.negotiation.handshake.hello import EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import Offer
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import this_process
from kvplug.net.trust.listener import Listener
from kvplug.net.wire.values import encode
from kvplug.transport.capabilities import Capabilities

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

CHILD = textwrap.dedent(
    """
    import sys, time
    import attrs
    from kvplug.errors import HandshakeError
    from kvplug.negotiation.handshake.exchange import exchange
    from kvplug.negotiation.handshake.hello import Hello
    from kvplug.net.trust.channel import Channel
    from kvplug.net.trust.credentials import Credentials
    from kvplug.net.trust.identity import this_process
    from kvplug.net.trust.listener import dial
    from kvplug.net.wire.values import decode

    what = sys.argv[1]
    lines = sys.stdin.buffer
    contact = lines.readline().decode().strip()
    hello = Hello.from_plain(decode(lines.read()))
    engine = attrs.evolve(hello.engine, role="consumer", block_size=32)
    channel = Channel(dial(contact, Credentials(), "test", 20, label="child"))
    if what == "stay silent":
        print("here", flush=True)
        time.sleep(60)
    if what == "differ":
        engine = attrs.evolve(engine, layout="BTD", role="producer")
    hello = attrs.evolve(hello, engine=engine, identity=this_process("child"))
    try:
        found = exchange(channel, hello, timeout=20)
        print(found.transports["cpu"].chosen, found.checksum, *found.converts, sep="|", flush=True)
    except HandshakeError as e:
        print("refused", *(reason.partition(":")[0] for reason in e.reasons), sep="|", flush=True)
    channel.close()
    """
)


@pytest.fixture
def listener() -> Iterator[Listener]:
    opened = Listener.open("unix:", Credentials(), "test")
    try:
        yield opened
    finally:
        opened.close()


class Child:
    """A real process that dials the listener and does what it is told."""

    def __init__(self, what: str, listener: Listener, hello: Hello = OURS) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None
        self.process.stdin.write(listener.contact.encode() + b"\n" + encode(hello.to_plain()))
        self.process.stdin.close()

    def line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip().split("|")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_two_processes_agree(listener: Listener) -> None:
    with Child("agree", listener) as child, Channel(listener.accept(20)) as channel:
        found = exchange(channel, OURS, timeout=20)
        assert found.remote.identity.label == "child" and found.remote.identity.pid == child.process.pid
        assert found.converts == ("block_size: ours 16, theirs 32",)
        assert child.line() == ["net", "xxh3_64", "block_size: ours 32, theirs 16"]


def test_two_processes_refuse_for_the_same_reasons_and_name_each_other(listener: Listener) -> None:
    with Child("differ", listener) as child, Channel(listener.accept(20)) as channel:
        with pytest.raises(HandshakeError, match=f"pid {child.process.pid}") as refusal:
            exchange(channel, OURS, timeout=20)
        assert child.line() == ["refused", *(it.partition(":")[0] for it in refusal.value.reasons)]
        assert child.line() == [""]


def test_a_peer_that_says_nothing_is_a_timeout_and_one_that_is_killed_is_gone(listener: Listener) -> None:
    with Child("stay silent", listener) as child, Channel(listener.accept(20)) as channel:
        assert child.line() == ["here"]
        with pytest.raises(TimeoutError):
            exchange(channel, OURS, timeout=0.2)
        killer = threading.Timer(0.2, child.process.kill)
        killer.start()
        started = time.monotonic()
        with pytest.raises(PeerGoneError):
            exchange(channel, OURS, timeout=30)
        killer.join()
        assert time.monotonic() - started < 10
