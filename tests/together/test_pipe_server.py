"""A pipe server whose clients are many, stopped or dead half-way."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import pytest
import torch

from kvplug import (
    ClosedError,
    Config,
    HandshakeError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
    TransportError,
    connect_pipe,
    listen_pipe,
)
from kvplug.assembly import links as links_of_peers
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.peers import ControlPeers
from kvplug.assembly.pipes import PipeServer
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.transport import Pipe
from kvplug_testing import peers
from kvplug_testing.waits import Call, raises, until

pytestmark = pytest.mark.timeout(60)

CONFIG = Config(transport="cpu", timeout_s=20, connect_timeout_s=20)
CLIENTS = 12


def hold(parent: peers.Parent, contact: str, transport: str) -> None:
    """A client that sends nothing until it is killed."""
    with connect_pipe(attrs.evolve(CONFIG, transport=transport), contact):
        parent.recv(timeout=None)


def agree_only(parent: peers.Parent, contact: str) -> None:
    """A client that never opens its pipe."""
    link = ControlPeers(LinkSettings(resolved=ResolvedConfig(CONFIG)), connect=contact).connect(0, "pipe")
    parent.send(str(link.agreement.transports["cpu"].chosen))
    parent.recv()


def joined(server: PipeServer, config: Config = CONFIG) -> tuple[Pipe, Pipe]:
    """The server's end of a new pipe, and the client's."""
    joining = Call(lambda: connect_pipe(config, server.contact))
    return server.accept(), joining.result()


def counted(caplog: pytest.LogCaptureFixture, name: str = "cpu", **more: Any) -> Config:
    """A config whose pipes a sink counts, in the log."""
    caplog.set_level(logging.INFO, "kvplug.metrics.sinks")
    return attrs.evolve(CONFIG, transport=name, sinks=("log",), **more)


def received(caplog: pytest.LogCaptureFixture) -> list[int]:
    """How many messages were received, and how many receives failed with a lost peer, by the sink."""
    lines = "\n".join(message for message in caplog.messages if " recv: " in message)
    found = [re.findall(pattern, lines) for pattern in (r"recv: (\d+) done", r"failed: peer_gone (\d+)")]
    return [sum(map(int, each)) for each in found]


def accepted(server: PipeServer, count: int) -> list[Pipe]:
    """Polls, as a program does that has other work in the same thread."""
    pipes: list[Pipe] = []
    for _ in range(4000):
        try:
            pipes.append(server.accept(timeout=0.01))
        except TimeoutError:
            continue
        if len(pipes) == count:
            return pipes
    raise AssertionError(f"only {len(pipes)} of {count} clients came")


@pytest.mark.parametrize("at_once", [128, 5])
def test_a_server_that_polls_turns_no_client_away(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplug.transport.acceptor.MAX_SERVED", at_once)
    with listen_pipe(CONFIG, "unix:") as server:
        calls = [Call(lambda: connect_pipe(CONFIG, server.contact)) for _ in range(CLIENTS)]
        theirs = accepted(server, CLIENTS)
        ours = [call.result(20) for call in calls]
        for number, pipe in enumerate(ours):
            pipe.send_tensor(torch.full((4,), number))
        assert sorted(int(pipe.recv_tensor(timeout=20)[0]) for pipe in theirs) == list(range(CLIENTS))
        for pipe in (*ours, *theirs):
            pipe.close()


def test_clients_that_are_stopped_or_killed_half_way_delay_no_other_and_are_logged(
    fork_server, caplog
) -> None:
    with (
        listen_pipe(CONFIG, "unix:") as server,
        fork_server.start(f"{__file__}:agree_only", server.contact) as stopped,
        fork_server.start(f"{__file__}:agree_only", server.contact) as killed,
    ):
        assert stopped.recv() == killed.recv() == "cpu"
        stopped.stop()
        killed.kill()
        ours = connect_pipe(CONFIG, server.contact)
        with accepted(server, 1)[0] as theirs:
            ours.send_tensor(torch.ones(8)).wait(20)
            assert theirs.recv_tensor(timeout=20).tolist() == [1] * 8
            ours.close()
        until(lambda: "a link for" in caplog.text, what="the warning about a client that died")
        raises(TimeoutError, lambda: server.accept(timeout=0.2))
        stopped.cont()


def test_closing_ends_the_pipes_that_were_not_accepted_and_those_under_way(fork_server) -> None:
    server = listen_pipe(CONFIG, "unix:")
    with fork_server.start(f"{__file__}:agree_only", server.contact) as half:
        half.recv()
        ours = connect_pipe(CONFIG, server.contact)
        waiting = Call(lambda: ours.recv_tensor(timeout=20))
        server.close()
        assert isinstance(waiting.outcome(10), ClosedError | PeerGoneError)
        ours.close()
        raises(ClosedError, server.accept)
        assert not [t.name for t in threading.enumerate() if t.name.startswith("kvplug-link")]


def test_a_pipe_that_fails_here_when_the_other_end_has_it_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links_of_peers, "_ACCEPT_S", 0.2)

    class Waiting:
        contact = "somewhere"
        closed = threading.Event()

        def listen(self) -> Waiting:
            return self

        def accept(self, timeout: float) -> Pipe:
            assert self.closed.wait(timeout), "it waited to the end"
            raise ClosedError("the listener is closed")

        def close(self) -> None:
            self.closed.set()

    with links(accepts=Waiting()) as (theirs, ours):
        opening = Call(lambda: theirs.open_pipe("pages", timeout=20))
        asked = ours.channel.recv(5)
        assert (asked["pipe"], asked["contact"]) == ("pages", "somewhere")
        ours.channel.send({"pipe": "pages", "joined": True})
        assert "joined the pipe 'pages', but this end did not complete it" in str(
            opening.raised(TransportError, 5)
        )


@contextmanager
def links(*, accepts: Any = None, joins: Any = None) -> Iterator[tuple[Any, Any]]:
    """Two ends of a link, the accepted one first, whose pipes are made by these endpoints."""

    def made_by(endpoint: Any) -> Any:
        resolved = ResolvedConfig(CONFIG)
        if endpoint is not None:
            resolved.pipe_endpoint = lambda *_: endpoint
        return LinkSettings(resolved=resolved)

    with ExitStack() as stack:
        server = ControlPeers(made_by(accepts), listen="unix:")
        stack.callback(server.close)
        listener = server.serve(lambda link, _: link, ControlLink.close)
        there = Call(lambda: listener.accept(20))
        ours = ControlPeers(made_by(joins), connect=listener.contact).connect(0, "x")
        stack.callback(ours.close)
        theirs = there.result()
        stack.callback(theirs.close)
        yield theirs, ours


def test_an_end_that_cannot_join_a_pipe_reports_it_and_the_other_one_does_not_wait() -> None:
    """As with a pipe whose address the other end cannot reach: here its listener is gone by then."""

    class Unreachable:
        def connect(self, contact: str, timeout: float) -> Pipe:
            raise TransportError("no way leads there")

    with links(joins=Unreachable()) as (theirs, ours):
        waiting = Call(lambda: theirs.open_pipe("pages"))
        raises(TransportError, lambda: ours.open_pipe("pages"))
        error = waiting.raised(HandshakeError, 5)
        assert "no way leads there" in str(error)
        ours.channel.send("and the channel goes on")
        assert theirs.channel.recv(5) == "and the channel goes on"


def test_an_end_that_cannot_accept_a_pipe_leaves_the_channel_to_its_caller() -> None:
    """The other end reports its failure late, and the report is not taken for what it sends next."""
    has_failed = threading.Event()

    class Slow:
        def connect(self, contact: str, timeout: float) -> Pipe:
            has_failed.wait(timeout)
            time.sleep(0.2)
            raise TransportError("no listener is there any more")

    class Failing:
        contact = "somewhere"

        def listen(self) -> Failing:
            return self

        def accept(self, timeout: float) -> Pipe:
            has_failed.set()
            raise TransportError("no pipe can be made of what came")

        def close(self) -> None: ...

    with links(accepts=Failing(), joins=Slow()) as (theirs, ours):
        joining = Call(lambda: ours.open_pipe("pages"))
        with pytest.raises(TransportError, match="no pipe can be made"):
            theirs.open_pipe("pages")
        assert "no listener" in str(joining.raised(TransportError, 5))
        ours.channel.send("the next message")
        assert theirs.channel.recv(5) == "the next message"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"connector": "lookpu"}, "connector: a plain pipe has no connector, but 'lookpu' was given"),
        ({"integrity": "xxh3_46"}, "integrity: a plain pipe sends tensors without a hash"),
        ({"sinks": ("lgo",)}, "sinks: no sink named 'lgo'"),
        ({"sinks": ("log", "kvplug:log")}, "'log' and 'kvplug:log' are the same sink; name it once"),
    ],
)
def test_what_a_plain_pipe_does_not_do_is_refused(given: dict[str, Any], message: str) -> None:
    config = attrs.evolve(CONFIG, **given)
    for make in (listen_pipe, connect_pipe):
        with pytest.raises(KvplugError, match=re.escape(message)):
            make(config, "unix:")


@pytest.mark.parametrize("name", ["cpu", "shm"])
def test_a_killed_peer_counts_as_a_failure_and_one_that_closes_does_not(
    name: str, fork_server, caplog
) -> None:
    with listen_pipe(counted(caplog, name), "unix:") as server:
        for number in range(8):
            theirs, ours = joined(server, attrs.evolve(CONFIG, transport=name))
            ours.send_tensor(torch.tensor([number]))
            assert theirs.recv_tensor().tolist() == [number]
            waiting = Call(lambda pipe=theirs: pipe.recv_tensor(timeout=20))
            ours.close()
            assert waiting.raised(PeerGoneError, 10).closed
            theirs.close()
        with fork_server.start(f"{__file__}:hold", server.contact, name) as client:
            theirs = server.accept()
            client.kill()
            assert not raises(PeerGoneError, lambda: theirs.recv_tensor(timeout=20)).closed
            theirs.close()
    assert received(caplog) == [8, 1]
