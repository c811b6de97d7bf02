"""The root causes of the family's CVEs, shown to be absent from what exists here.

=============== ============================================================ ==========================
CVE             root cause                                                   where it would be here
=============== ============================================================ ==========================
2025-47277      the rendezvous store listens on every interface              group
2025-47277      what arrives there is unpickled                              group, channel
2025-29783      tensor bytes and metadata of the pipe are unpickled          wire, channel
2025-32444      a hidden receive-object call unpickles; bound to everything  channel, listener
2024-11041      ``pickle.loads`` of what came from a socket                  channel
=============== ============================================================ ==========================

Those of the message queue (2025-30165, 2025-30202) are in the tests of kvplug-shm, test_shm_remote_*.py. The
payloads are pickles that would create a file.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvplug.errors import PeerGoneError, WireError
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials, Secret
from kvplug.net.trust.listener import Listener
from kvplug.net.wire.frames import FrameKind, encode_header
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.group.store import PURPOSE
from kvplug_testing import peers
from kvplug_testing.pairs import accepting
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(60)
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="no /proc/net")

SECRET = Credentials(Secret("the secret of these tests"))


def evil(path: Path) -> bytes:
    """A protocol-0 pickle, written by hand: ``builtins.open(path, "w")``."""
    return f"cbuiltins\nopen\n(V{path}\nVw\ntR.".encode()


def ours() -> list[str]:
    """Local addresses that this process listens on over TCP, as the kernel prints them."""
    held = {each.partition(" -> ")[2] for each in peers.Resources.of().descriptors}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text(encoding="utf-8").splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]


LOOPBACK = "0100007F" if sys.byteorder == "little" else "7F000001"


@pytest.fixture
def two() -> Iterator[Callable[[str], tuple[Listener, StatelessGroup, StatelessGroup]]]:
    """Makes a group of two ranks at an address."""
    with ExitStack() as stack:

        def make(address: str) -> tuple[Listener, StatelessGroup, StatelessGroup]:
            listener = StatelessGroup.listen(address, SECRET)
            zero = Call(
                lambda: StatelessGroup.create(listener, rank=0, world_size=2, credentials=SECRET, timeout=20)
            )
            one = StatelessGroup.create(
                listener.contact, rank=1, world_size=2, credentials=SECRET, timeout=20
            )
            stack.callback(one.close)
            stack.callback(zero.result().close)
            return listener, zero.result(), one

        yield make


@needs_proc
def test_cve_2025_47277_the_store_listens_on_the_interface_it_was_given_and_on_no_other(two: Any) -> None:
    before = ours()
    listener, group, one = two("127.0.0.1:0")
    one.set("k", 1)
    assert group.get("k") == 1
    opened = [address for address in ours() if address not in before]
    port = int(listener.contact.rsplit(":", 1)[1])
    assert opened == [f"{LOOPBACK}:{port:04X}"]
    one.close()
    group.close()
    assert ours() == before


def test_cve_2025_47277_pickles_at_the_door_are_refused_unread(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    with accepting("127.0.0.1:0", SECRET, PURPOSE) as listener:
        host, port = listener.contact.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as s:
            s.sendall(evil(marker).ljust(200, b" "))
            s.settimeout(5)
            assert len(s.recv(1000)) <= 40
        assert listener.refusals == {"garbage": 1}
    assert not marker.exists()


def test_cve_2024_11041_and_2025_29783_a_pickle_from_a_proven_peer_is_not_a_value(tmp_path: Path) -> None:
    """A peer that knows the secret cannot execute code either."""
    marker = tmp_path / "executed"
    payloads = [
        evil(marker),
        encode_header(FrameKind.VALUE, len(evil(marker))) + evil(marker),
        encode_header(FrameKind.TENSOR, len(evil(marker))) + evil(marker),
    ]
    for payload in payloads:
        with accepting("unix:", Credentials(), "test") as listener:
            attacker = Connection.dial(listener.contact, Credentials(), "test", 5)
            channel = Channel(listener.accept(5))
        attacker.sock.sendall(payload)
        with pytest.raises(WireError):
            channel.recv(5)
        channel.close()
        attacker.close()
    assert not marker.exists()


def test_cve_2025_32444_a_pickle_inside_a_value_stays_the_bytes_it_is(two: Any, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    listener, group, one = two("unix:")
    one.set("k", evil(marker))
    assert group.get("k") == evil(marker)
    with Channel(Connection.dial(listener.contact, SECRET, PURPOSE, 5)) as attacker:
        attacker.send(("ask", evil(marker)))
        with pytest.raises(PeerGoneError):
            attacker.recv(5)
    # A member that writes what is no value under a key: its readers get an error, and nothing runs.
    with Channel(Connection.dial(listener.contact, SECRET, PURPOSE, 5)) as member:
        for request in (("ask", 1), ("set", "raw", evil(marker))):
            member.send(request)
            assert member.recv(5)[0] == "ok"
    with pytest.raises(WireError):
        group.get("raw")
    assert not marker.exists()
