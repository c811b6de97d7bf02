"""Listeners and diallers over real sockets, also with peers that do not prove themselves."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from kvplug.config.addresses import Address
from kvplug.errors import (
    AddressInUseError,
    AuthenticationError,
    InsecureAddressError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
)
from kvplug.net.deadline import Deadline
from kvplug.net.trust.challenge import RefusedError
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials, Secret
from kvplug.transport import Acceptor
from kvplug_testing import peers
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.pairs import accepting
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call, until

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

OPEN = Credentials()
SECRET = Credentials(Secret("the secret of these tests"))
OTHER = Credentials(Secret("another secret altogether"))
TCP = ("127.0.0.1:0", "[::1]:0", "localhost:0")
MEETINGS = [("unix:", OPEN), *((address, SECRET) for address in ("unix:", *TCP))]
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


def refusals_become(listener: Acceptor[Connection], **expected: int) -> None:
    wanted = {name.replace("_", " "): count for name, count in expected.items()}
    until(lambda: listener.refusals == wanted, what=f"{wanted}; there are {listener.refusals}")


def stranger(listener: Acceptor[Connection]) -> socket.socket:
    """A raw connection that knows nothing."""
    return stranger_at(listener.contact)


def stranger_at(address: str) -> socket.socket:
    if address.startswith("unix:@"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + address.removeprefix("unix:@"))
        return sock
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)))


def meet(listener: Acceptor[Connection], credentials: Credentials = OPEN, contact: str = "") -> Connection:
    """Dial, and check that both ends hold the same connection."""
    ours = Connection.dial(contact or listener.contact, credentials, "test", 5)
    theirs = listener.accept(5)
    ours.sock.sendall(b"ping")
    assert theirs.sock.recv(10) == b"ping"
    theirs.close()
    return ours


@pytest.mark.parametrize(("address", "credentials"), MEETINGS)
def test_two_ends_connect_and_identify_each_other(address: str, credentials: Credentials) -> None:
    with (
        accepting(address, credentials, "test", label="server") as listener,
        Connection.dial(listener.contact, credentials, "test", 5, label="client") as ours,
        listener.accept(5) as theirs,
    ):
        assert ours.peer.pid == theirs.peer.pid == os.getpid()
        assert (ours.peer.label, theirs.peer.label) == ("server", "client")
        assert ours.mode is theirs.mode
        assert ours.sock.gettimeout() is None and theirs.sock.gettimeout() is None
        assert "server" in ours.describe and listener.contact in ours.describe
    assert listener.refusals == {}


# -- refusals --------------------------------------------------------------------------------------


REFUSED = {
    "another secret": ("127.0.0.1:0", SECRET, OTHER, "test", "KVPLUG_SECRET or secret_file", "credentials"),
    "no secret": ("unix:", SECRET, OPEN, "test", "it has a secret and this end has none", "credentials"),
    "a secret": (
        "unix:",
        OPEN,
        SECRET,
        "test",
        "this end has a secret and the listener has none",
        "credentials",
    ),
    "another purpose": ("unix:", OPEN, OPEN, "else", "another purpose than 'else'", "purpose"),
}
"""Address, credentials of both ends, purpose of the dialler, the message of its error, what is counted."""


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_dialler_that_does_not_fit_is_refused_with_the_reason(case: tuple[Any, ...]) -> None:
    address, has, brings, purpose, message, counted = case
    with accepting(address, has, "test") as listener:
        with pytest.raises(AuthenticationError, match=message):
            Connection.dial(listener.contact, brings, purpose, 5)
        until(lambda: sum(listener.refusals.values()) == 1)
        assert listener.refusals == {counted: 1}
        with pytest.raises(TimeoutError, match=f"no peer connected to .*{counted}: 1") as caught:
            listener.accept(0.05)
        assert isinstance(caught.value.__cause__, AuthenticationError)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "0.0.0.0", "[::]", "192.0.2.1"])
def test_without_a_secret_or_tls_nothing_is_bound_or_dialled_over_tcp(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was made")

    monkeypatch.setattr(socket, "socket", no_socket)
    with pytest.raises(InsecureAddressError, match=r"host: .*neither a secret nor TLS is set.*config secret"):
        accepting(f"{host}:29555", OPEN, "test")
    with pytest.raises(InsecureAddressError, match=r"neither a secret nor TLS is set.*config secret"):
        Connection.dial(f"{host}:29555", OPEN, "test", 1)


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["unix:", "127.0.0.1:0"])
def test_an_address_in_use_is_named_and_so_is_the_process_that_uses_it(address: str) -> None:
    with accepting(address, SECRET, "test") as listener:
        with pytest.raises(AddressInUseError) as caught:
            accepting(listener.contact, SECRET, "test")
        assert listener.contact in str(caught.value)
        assert f"pid {os.getpid()}" in str(caught.value)


def test_a_port_can_be_listened_on_again_at_once() -> None:
    with accepting("127.0.0.1:0", SECRET, "test") as listener:
        address = listener.contact
        meet(listener, SECRET).close()
    with accepting(address, SECRET, "test") as listener:
        meet(listener, SECRET).close()


def test_a_socket_that_connected_to_itself_is_not_a_peer() -> None:
    """Dialling a port of the ephemeral range again and again ends up being connected to oneself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    real = socket.socket.connect

    def from_the_same_port(self: socket.socket, address: object) -> None:
        self.bind(("127.0.0.1", port))
        real(self, address)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", from_the_same_port)
        with pytest.raises(PeerGoneError, match="no process listens"):
            Connection.dial(f"127.0.0.1:{port}", SECRET, "test", 5)


def test_dial_until_waits_for_a_late_listener() -> None:
    with accepting("unix:", OPEN, "test") as listener:
        address = listener.contact
    dialling = Call(lambda: Connection.dial_until(address, OPEN, "test", Deadline.after(20)))
    assert dialling.is_blocked(0.3)
    with accepting(address, OPEN, "test") as listener:
        listener.accept(10).close()
        dialling.result(10).close()


@pytest.mark.parametrize("last", ["refused", "not answered"])
def test_dial_until_names_what_the_listener_lacked_until_the_deadline(
    last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortage = ResourceExhaustedError("no free descriptor", resource="descriptors")

    def refuse(*args: Any) -> None:
        if last == "not answered" and listener.refusals:
            return
        raise RefusedError.for_lack(shortage)

    monkeypatch.setattr("kvplug.net.trust.listener.Listener._challenge", refuse)
    with accepting("unix:", OPEN, "test") as listener:
        with pytest.raises(ResourceExhaustedError, match=r"no connection was made .* descriptor") as error:
            Connection.dial_until(listener.contact, OPEN, "test", Deadline.after(0.3))
        assert error.value.resource == "descriptors"


# -- strangers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "credentials"), MEETINGS[:3])
def test_strangers_that_are_silent_or_send_garbage_delay_no_peer(
    address: str, credentials: Credentials
) -> None:
    with accepting(address, credentials, "test") as listener, ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(stranger(listener))
        for data in (b"\0", b"GET / HTTP/1.1\r\n\r\n" * 8, os.urandom(100_000), b"KVPT" + bytes(68)):
            with stranger(listener) as s, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                s.sendall(data)
        began = time.monotonic()
        meet(listener, credentials).close()
        assert time.monotonic() - began < 4
        assert listener.refusals["garbage"] >= 1


def test_more_strangers_than_there_are_places_push_each_other_out_not_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvplug.net.trust.listener._MAX_UNPROVEN", 8)
    with accepting("unix:", OPEN, "test") as listener, ExitStack() as stack:
        socks = [stack.enter_context(stranger(listener)) for _ in range(50)]
        meet(listener).close()
        until(lambda: listener.refusals.get("busy", 0) >= 42)
        socks[0].settimeout(5)
        assert len(socks[0].recv(100)) == 40, "the one that makes room gets a refusal"
        assert socks[0].recv(100) == b""


@pytest.mark.timing
def test_a_stranger_that_dribbles_is_dropped_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplug.net.trust.listener._PROOF_TIMEOUT_S", 0.4)
    with accepting("unix:", OPEN, "test") as listener:
        with stranger(listener) as slow:
            began = time.monotonic()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(70):
                    slow.send(b"K")
                    time.sleep(0.02)
            assert 0.3 < time.monotonic() - began < 1.2
        assert listener.refusals == {"silent": 1}
        meet(listener).close()


def test_a_dial_to_something_else_does_not_hang() -> None:
    for answer, error in (
        (b"", PeerGoneError),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", AuthenticationError),
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]

            def serve(server: socket.socket = server, answer: bytes = answer) -> None:
                sock, _ = server.accept()
                with sock:
                    sock.recv(100)
                    sock.sendall(answer)

            serving = Call(serve)
            with pytest.raises(error):
                Connection.dial(f"127.0.0.1:{port}", SECRET, "test", 5)
            serving.result()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(TimeoutError, match="did not answer in time"),
    ):
        Connection.dial(f"127.0.0.1:{silent.getsockname()[1]}", SECRET, "test", 0.2)


# -- life ------------------------------------------------------------------------------------------


def test_connections_that_were_not_accepted_are_closed_with_the_listener() -> None:
    listener = accepting("unix:", OPEN, "test")
    with Connection.dial(listener.contact, OPEN, "test", 5) as ours:
        listener.close()
        with contextlib.suppress(ConnectionResetError):  # it was closed before it had read our last message
            assert ours.sock.recv(1) == b""


def test_a_forked_child_has_no_connection_that_is_being_made() -> None:
    """The listener accepts it and does not answer the challenge."""
    before = in_forked_child(held)
    name = f"kvplug-silent-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{name}")
        silent.listen()
        dial = Call(lambda: Connection.dial(f"unix:@{name}", OPEN, "test", 10))
        accepted, _ = silent.accept()
        with accepted:
            assert accepted.recv(1, socket.MSG_PEEK)  # the dialling end waits for the answer
            ours = {f"{each.fileno()} -> " for each in (silent, accepted)}
            more = more_than(before).split(", ")
            assert [each for each in more if not each.startswith(tuple(ours))] == []
        dial.raised(PeerGoneError)


@pytest.fixture(scope="module")
def small_server(core_server: Callable[[], ForkServer]) -> ForkServer:
    """Of a module: it is started before `nothing_left` looks."""
    return core_server()


def test_forks_at_any_moment_of_dialling_accepting_and_closing_leave_a_child_nothing(
    small_server: ForkServer,
) -> None:
    """Also between a system call that makes or closes a descriptor and the object that owns it. The process
    that forks is small: a fork of this one, with all tests and torch, takes 90 ms of processor time.
    """
    with small_server.start(f"{__file__}:fork_while_others_meet", 100) as child:
        more = child.result()
    assert not more, f"{len(more)} children of 100: {max(more)}"


def fork_while_others_meet(parent: Parent, forks: int) -> list[str]:
    """In a child: what forked children of it hold while threads dial, accept and close."""
    before = in_forked_child(held)
    over = threading.Event()
    with accepting("127.0.0.1:0", SECRET, "test") as listener:

        def dial() -> None:
            while not over.is_set():
                Channel(Connection.dial(listener.contact, SECRET, "test", 20)).close()

        def accept() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    listener.accept(0.1).close()

        calls = [Call(each) for each in (dial, dial, accept)]
        more = [more_than(before) for _ in range(forks)]
        over.set()
        for call in calls:
            call.result()
    return [each for each in more if each]


def test_a_forked_child_has_no_connection_whatever_holds_it() -> None:
    with (
        accepting("unix:", OPEN, "test") as listener,
        Connection.dial(listener.contact, OPEN, "test", 5) as ours,
        listener.accept(5) as theirs,
    ):
        assert in_forked_child(lambda: f"{ours.fileno()} {theirs.fileno()}") == "-1 -1"
        ours.sock.sendall(b"the parent goes on")
        assert theirs.sock.recv(100) == b"the parent goes on"


def test_the_secret_is_neither_logged_nor_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        with accepting("127.0.0.1:0", SECRET, "test") as listener:
            ours = meet(listener, SECRET)
            shown = [repr(listener), repr(ours), str(ours), ours.describe, listener.contact]
            ours.close()
            with stranger(listener) as s:
                s.sendall(b"x" * 100)
            for credentials, purpose in ((SECRET, "else"), (OTHER, "test")):
                with pytest.raises(AuthenticationError) as refused:
                    Connection.dial(listener.contact, credentials, purpose, 5)
                shown.append(str(refused.value))
        with pytest.raises(PeerGoneError) as gone:
            Connection.dial(listener.contact, SECRET, "test", 5)
        shown.append(str(gone.value))
    shown += [thread.name for thread in threading.enumerate()]
    assert "secret of these tests" not in caplog.text + "".join(shown)
    refused_for = {vars(each)["reason"] for each in caplog.records if hasattr(each, "reason")}
    assert refused_for == {"garbage", "purpose", "credentials"}


def sockets() -> set[int]:
    """The descriptors of this process's sockets."""
    return {int(each.split()[0]) for each in peers.Resources.of().descriptors if "-> socket:" in each}


@pytest.mark.parametrize("address", ["unix:", "127.0.0.1:0"])
def test_a_closed_listener_that_another_process_still_holds_open_accepts_no_connection(address: str) -> None:
    before = sockets()
    listener = accepting(address, SECRET, "test")
    copies = [os.dup(fd) for fd in sockets() - before]  # as in a child that was forked and has not run yet
    listener.close()
    with pytest.raises(PeerGoneError, match="no process listens"):
        Connection.dial(listener.contact, SECRET, "test", 5)
    for copy in copies:
        os.close(copy)


def test_descriptors_are_not_inherited_by_programs_that_are_started() -> None:
    before = sockets()
    with (
        accepting("unix:", OPEN, "test") as listener,
        Connection.dial(listener.contact, OPEN, "test", 5),
        listener.accept(5),
    ):
        made = sockets() - before
        assert len(made) == 3 and not any(map(os.get_inheritable, made))


# -- another user of this host ---------------------------------------------------------------------

needs_root = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="becoming another user takes root"
)


def become_nobody() -> None:
    """In a child. It has imported everything: the other user may not be able to read our files."""
    "".encode("idna")
    os.setgid(65534)
    os.setuid(65534)


@needs_root
@pytest.mark.parametrize("is_honest", [True, False], ids=["honest", "liar"])
def test_another_user_of_this_host_is_a_stranger(is_honest: bool) -> None:
    """Also one that skips its own check of the listener, and talks the protocol well."""
    with accepting("unix:", OPEN, "test") as listener:

        def attempt() -> str:
            become_nobody()
            if not is_honest:
                patch = pytest.MonkeyPatch()
                patch.setattr("kvplug.net.trust.connection._check_listener", lambda sock, where: None)
            with pytest.raises(AuthenticationError) as refused:
                Connection.dial(listener.contact, OPEN, "test", 5)
            return str(refused.value)

        assert "another user" in in_forked_child(attempt)
        if not is_honest:
            refusals_become(listener, other_user=1)
        with pytest.raises(TimeoutError):
            listener.accept(0.05)


def squats(parent: peers.Parent) -> bytes:
    become_nobody()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind("\0kvplug-squatted")
        listening.listen()
        parent.send("there")
        with listening.accept()[0] as taken:
            return taken.recv(1)


@needs_root
def test_a_listener_of_another_user_is_not_talked_to() -> None:
    """Any user can bind an abstract name first."""
    with peers.start(squats) as child:
        child.recv()
        with pytest.raises(AuthenticationError, match=r"refused to connect to .* another user"):
            Connection.dial("unix:@kvplug-squatted", OPEN, "test", 5)
        assert child.result() == b"", "it got a byte"


def floods(parent: peers.Parent, address: str) -> None:
    """200 connections that are silent, and held."""
    become_nobody()
    with ExitStack() as stack:
        for _ in range(200):
            s = stack.enter_context(stranger_at(address))
            with contextlib.suppress(OSError):  # refused already
                s.sendall(b"KVPT")
        parent.send("done")
        parent.recv()


@needs_root
@pytest.mark.parametrize(
    ("address", "credentials"),
    [("127.0.0.1:0", SECRET), ("unix:", SECRET), ("unix:", OPEN)],
    ids=["loopback", "Unix socket, a secret", "Unix socket"],
)
def test_another_user_who_floods_is_rated_and_delays_no_client(
    address: str, credentials: Credentials
) -> None:
    """One of ours is admitted meanwhile. At a Unix socket without a secret they have no places at all."""
    with (
        accepting(address, credentials, "test") as listener,
        peers.start(floods, listener.contact) as child,
    ):
        assert child.recv() == "done"
        meet(listener, credentials, contact=listener.contact).close()
        if (address, credentials) == ("unix:", OPEN):
            refusals_become(listener, other_user=200)
        else:  # 48 hold places, 64 more were dropped for newer ones, and the rest was not looked at
            until(lambda: listener.refusals.get("busy", 0) >= 200 - 48 - 1)
        child.send("enough")
        child.result()


def test_an_address_that_floods_is_rated_and_delays_no_client() -> None:
    """From the address of an interface: the kernel shows no user, as for another host."""
    with accepting("0.0.0.0:0", SECRET, "test") as listener, ExitStack() as stack:
        host, port = listener.contact.rsplit(":", 1)
        if Address(host).is_loopback:
            pytest.skip("this host has no address beside loopback")
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), 5))
        refusals_become(listener, busy=200 - 48)
        meet(listener, SECRET, contact=f"127.0.0.1:{port}").close()


def test_what_strangers_send_takes_no_more_memory_than_their_places() -> None:
    with accepting("unix:", OPEN, "test") as listener, ExitStack() as stack:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for i in range(300):
                s = stack.enter_context(stranger(listener))
                s.setblocking(False)
                with contextlib.suppress(OSError):
                    s.send(b"KVPT\x01\x03\0\0" + os.urandom(500_000) if i % 2 else os.urandom(60))
            meet(listener).close()
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert held < 1 << 20  # 300 socket objects of the test itself are in it
        assert sum(listener.refusals.values()) >= 300 - 64


def test_without_the_peers_user_from_the_kernel_there_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    with accepting("unix:", OPEN, "test") as listener:
        monkeypatch.setattr("kvplug.net.trust.listener.unix_peer_uid", lambda sock: None)
        with pytest.raises(AuthenticationError, match="another user"):
            Connection.dial(listener.contact, OPEN, "test", 5)
        refusals_become(listener, other_user=1)
        monkeypatch.undo()
        monkeypatch.setattr("kvplug.net.trust.connection.unix_peer_uid", lambda sock: None)
        with pytest.raises(AuthenticationError, match="refused to connect to"):
            Connection.dial(listener.contact, OPEN, "test", 5)


@needs_linux
def test_a_listener_out_of_descriptors_comes_back_when_there_are_some() -> None:
    with peers.start(has_few_descriptors) as child:
        where = child.recv()
        with ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(stranger_at(where))
            time.sleep(0.5)
        with Connection.dial_until(where, OPEN, "test", Deadline.after(20)) as ours:
            ours.sock.sendall(b"ping")
            assert child.result() == b"ping"


def has_few_descriptors(parent: peers.Parent) -> bytes:
    listener = accepting("unix:", OPEN, "test")
    room = max(map(int, os.listdir("/proc/self/fd"))) + 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, room))
    parent.send(listener.contact)
    with listener.accept(30) as connection:
        return connection.sock.recv(10)
