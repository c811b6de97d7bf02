"""Control channels that end early: at shutdown, or because a peer is silent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvplug import ClosedError, Config, HandshakeError, KvplugError, PeerGoneError, Registry
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.peers import CONTROL, ControlPeers, LinkServer
from kvplug.assembly.resolve import EPOCH, ResolvedConfig
from kvplug.engine import PeerLink
from kvplug.negotiation.exchange import identity_of
from kvplug.net.trust.channel import Channel
from kvplug.transport import Connection, Credentials, Deadline
from kvplug_testing import waits
from kvplug_testing.pairs import accepting
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(30)


def settings(**more: Any) -> LinkSettings:
    config = Config.from_dict({"timeout_s": 20, "connect_timeout_s": 20, **more})
    return LinkSettings(resolved=ResolvedConfig(config, Registry()))


def peers_of(engine_id: str, **more: Any) -> ControlPeers:
    """Peers without transports: no KV is to cross."""
    return ControlPeers(attrs.evolve(settings(engine_id=engine_id), moves_kv=False), **more)


def listening(peers: ControlPeers) -> LinkServer[ControlLink]:
    return peers.serve(lambda link, _: link, ControlLink.close)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        new = set(threading.enumerate()) - before
        return [thread.name for thread in new if thread.name.startswith("kvplug-")]

    waits.until(lambda: not left(), 3, "the end of all threads")


def test_closing_ends_the_handshake_of_a_silent_peer() -> None:
    peers = ControlPeers(settings(), listen="unix:")
    listener = listening(peers)
    silent = Channel(Connection.dial(listener.contact, Credentials(), CONTROL))
    time.sleep(0.2)
    begun = time.monotonic()
    peers.close()
    assert time.monotonic() - begun < 4
    assert not [t for t in threading.enumerate() if t.name == "kvplug-link-serve"]
    silent.close()


@pytest.mark.parametrize("is_silent", [False, True], ids=["no listener", "a silent listener"])
def test_closing_wakes_a_call_that_connects(is_silent: bool) -> None:
    """While it dials a peer that never comes, and in the handshake with a silent peer."""
    with accepting("unix:", Credentials(), CONTROL) as listener:
        contact = listener.contact if is_silent else "unix:@kvplug-test-links-no-listener"
        peers = ControlPeers(settings(), connect=contact)
        waiting = Call(lambda: peers.connect(0, "x"))
        accepted = listener.accept(5) if is_silent else None
        time.sleep(0.2)
        peers.close()
        waiting.raised(ClosedError, within=1)
        if accepted is not None:
            accepted.close()


def test_closed_peers_neither_dial_nor_listen_and_without_retry_a_dial_fails_at_once() -> None:
    peers = ControlPeers(settings(), listen="unix:", connect="unix:@kvplug-test-links-no-listener")
    begun = time.monotonic()
    with pytest.raises(PeerGoneError, match="no-listener"):
        peers.connect(0, "x", retry=False)
    assert time.monotonic() - begun < 4
    peers.close()
    with pytest.raises(ClosedError):
        peers.connect(0, "x")
    with pytest.raises(ClosedError):
        listening(peers)


def _failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if "failed" in each.getMessage()]


def test_another_engine_than_the_one_announced_is_refused_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs, dialling = peers_of("theirs", listen="unix:"), peers_of("mine")
    contact = listening(theirs).contact
    with caplog.at_level(logging.DEBUG):
        for announced, says in [
            (
                "0a/other",
                "announces 'other' at this address, but this engine itself answers; set host at 'other'",
            ),
            ("0a/theirs", "'theirs' has restarted since it was announced"),
        ]:
            caplog.clear()
            for _ in range(3):
                with pytest.raises(HandshakeError, match=says):
                    dialling.connect(0, "x", retry=False, peer={0: f"{contact}#{announced}"})
            waits.until(lambda: len(_failures(caplog)) == 3, what="three failures at the listener")
            levels = sorted(each.levelno for each in _failures(caplog))
            assert levels == [logging.DEBUG, logging.DEBUG, logging.WARNING], caplog.text
            assert "agreed with" not in caplog.text
    dialling.connect(0, "x", retry=False, peer={0: f"{contact}#{identity_of('theirs', EPOCH)}"}).close()
    dialling.close()
    theirs.close()


def test_each_step_of_a_connection_is_one_line_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        theirs, dialling = peers_of("theirs", listen="unix:"), peers_of("mine")
        contact = listening(theirs).contact
        dialling.connect(0, "x", retry=False, peer={0: contact}).close()
        waits.until(lambda: len(caplog.records) == 4, what="both ends have agreed")
    dialling.close()
    theirs.close()
    fields = [{**vars(each)} for each in caplog.records]
    assert [each["event"] for each in fields] == ["listening", "peer_connected", "agreed", "agreed"]
    assert [each["address"] for each in fields[:2]] == [contact, contact]
    assert {each["engine_id"] for each in fields[2:]} == {"theirs", "mine"}
    assert {each["purpose"] for each in fields[2:]} == {"x"}


def test_a_handshake_that_fails_in_an_unforeseen_way_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: LinkSettings, purpose: str) -> Any:
        raise ValueError("a probe that is wrong")

    monkeypatch.setattr(LinkSettings, "hello", broken)
    peers = ControlPeers(settings(), listen="unix:")
    listener = listening(peers)
    for _ in range(2):  # and the listener goes on
        channel = Channel(Connection.dial(listener.contact, Credentials(), CONTROL))
        with pytest.raises(KvplugError):
            channel.recv(5)
        channel.close()
    peers.close()


def test_each_link_is_served_in_a_thread_of_its_own_until_the_server_is_closed() -> None:
    """An error ends one link only, and so does the return of the function that serves it."""

    def answer(link: PeerLink, deadline: Deadline) -> None:
        assert not deadline.expired
        while (word := link.channel.recv(timeout=None)) != "enough":
            if word == "wrong":
                raise ValueError("a fault in the code that serves")
            link.channel.send(word)

    listening, dialling = peers_of("theirs", listen="unix:"), peers_of("mine")
    server = listening.serve(answer)
    links = [dialling.connect(0, "x", peer={0: server.contact}) for _ in range(3)]
    for link, last in [(links[0], "wrong"), (links[1], "enough")]:
        link.channel.send(last)
        with pytest.raises(PeerGoneError):
            link.channel.recv(5)
        links[2].channel.send("still there?")
        assert links[2].channel.recv(5) == "still there?"
    server.close()
    with pytest.raises(PeerGoneError):
        links[2].channel.recv(5)
    for link in links:
        link.close()
    dialling.close()
    listening.close()
