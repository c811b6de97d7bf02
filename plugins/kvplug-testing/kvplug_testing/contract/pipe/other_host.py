"""The ends are on two hosts, which share no memory, socket names or processes (capability ``cross_host``).

See :mod:`kvplug_testing.hosts`. Both ends are in other processes; the test gives commands and compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kvplug import KvplugError
from kvplug.transport import Pipe, PipeEndpoint
from kvplug_testing import waits
from kvplug_testing.contract.base import at_host, law
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.suite import CHILD_S, MIB, PipeSuite, name_of, named
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.peers import Parent, Peer

HEARTBEAT_S = 2.0
"""``heartbeat_timeout_s`` where a peer falls silent."""
SIZES = [1000, 0, 3 * MIB, 40 * MIB + 3, 10]


class OtherHost(PipeSuite):
    """One end listens on host 0 or 1, the other one connects from the other host."""

    @law("PIPE-1", "END-1", needs="another_host")
    @pytest.mark.parametrize("listening", [0, 1])
    def test_messages_arrive_whole_and_in_order_from_another_host(self, listening: int) -> None:
        sender, receiver = self._across((remote.send, SIZES), (remote.receive, SIZES), listening)
        assert receiver.recv() == "here"
        receiver.send("go")
        assert not (wrong := receiver.result(2 * waits.patience_s)), wrong
        assert (sender.recv(), sender.recv()) == ("queued", "sent")

    @law("PIPE-1", needs="both_ways_and_another_host")
    def test_order_holds_under_load_both_ways_with_another_host(self) -> None:
        ends = self._across((remote.both_ways, 200, 60_000), (remote.both_ways, 200, 60_000))
        for end in ends:
            assert end.recv(2 * waits.patience_s) == "received"
        for end in ends:
            end.send("go")
        for end in ends:
            assert not (wrong := end.result()), wrong

    @law("ALL-2", needs="another_host")
    @pytest.mark.parametrize("verb", ["receives", "sends"])
    def test_a_call_is_told_that_the_process_on_another_host_was_killed(self, verb: str) -> None:
        here, there = self._across((until_it_ends, verb), (remote.wait,))
        for end in (here, there):
            assert end.recv() == "here"
        assert not here.poll(0.3), "it ended while the other end was there"
        there.kill()
        _check_gone(here, f"the peer was killed while this end {verb}")

    @law("ALL-3", needs="another_host")
    def test_a_peer_on_another_host_is_dead_when_it_has_been_silent_for_so_long_and_not_when_it_is_idle(
        self,
    ) -> None:
        meeting = (until_it_ends, "receives")
        here, there = self._across(meeting, meeting, heartbeat_timeout_s=HEARTBEAT_S)
        for end in (here, there):
            assert end.recv() == "here"
        assert not here.poll(2 * HEARTBEAT_S), f"a peer that sends nothing ended the pipe: {here.result()}"
        there.stop()
        stopped = time.monotonic()
        _check_gone(here, "the peer was stopped")
        after_s = time.monotonic() - stopped
        assert after_s > HEARTBEAT_S / 2, f"a silence of {after_s:.2f} s was taken for a death"
        there.cont()
        _check_gone(there, "this end was stopped, its peer has given it up, and it went on")

    @law("ALL-5", "ALL-2", "ALL-3", needs="another_host")
    def test_every_transfer_and_call_ends_when_the_other_host_vanishes(self) -> None:
        here, there = self._across(
            (transfers_end,), (until_it_ends, "waits"), heartbeat_timeout_s=HEARTBEAT_S
        )
        assert there.recv() == "here"
        assert here.recv() == "queued"
        with self.hosts().apart():
            here.send("go")
            there.send("go")
            *transfers, error = here.result(HEARTBEAT_S + waits.patience_s)
            assert error == "PeerGoneError", f"the other host is gone, and receiving gave {error!r}"
            assert {*transfers} <= {"", "PeerGoneError"}, (
                f"the other host is gone, and transfers: {transfers}"
            )
            assert transfers[-1], "a message that nothing received is done"
            _check_gone(there, "the other host is gone")

    @law("ALL-4", "END-2", needs="another_host")
    def test_connecting_to_a_host_that_does_not_answer_ends_in_time_and_succeeds_when_it_does(self) -> None:
        listener = self._start_at(0, listening_end, remote.echo)
        contact = listener.recv()
        with self.hosts().apart():
            took_s, error = self._start_at(1, dialling_end, contact, 1.0).result(waits.patience_s)
            assert error in ("TimeoutError", "PeerGoneError"), f"no host answered, and connect gave {error!r}"
            assert took_s < 5.0, f"connect had 1 s, and took {took_s:.1f}"
        _, error = self._start_at(1, dialling_end, contact, waits.patience_s).result(2 * waits.patience_s)
        assert not error, f"the host answers again, and connect gave {error!r}"

    @property
    def both_ways_and_another_host(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return self.both_ways or self.another_host

    def _across(
        self, one: tuple[Any, ...], other: tuple[Any, ...], listening: int = 0, **options: Any
    ) -> tuple[Peer, Peer]:
        """The processes at the ends of a pipe: each runs ``what(parent, pipe, *args)``."""
        first = self._start_at(listening, listening_end, *one, **options)
        contact = first.recv()
        return first, self._start_at(1 - listening, connecting_end, *other, contact=contact, **options)

    def _start_at(self, host: int, end: Callable[..., Any], what: Any, *args: Any, **options: Any) -> Peer:
        given = name_of(what) if callable(what) else what
        return self.start_at(
            host, name_of(end), self.suite_ref(), host, options, given, list(args), timeout_s=CHILD_S
        )


def _check_gone(end: Peer, why: str) -> None:
    error, text = end.result(HEARTBEAT_S + waits.patience_s)
    assert error == "PeerGoneError", f"{why}, and its call gave {error!r}: {text}"


# -- on a host -------------------------------------------------------------------------------------


def _endpoint(suite_ref: dict[str, Any], host: int, options: dict[str, Any]) -> PipeEndpoint:
    suite = suite_from_ref(suite_ref)
    made: PipeEndpoint = suite.make_endpoint(attrs.evolve(suite.context(**options), **at_host(host)))
    return made


def listening_end(
    parent: Parent, suite_ref: dict[str, Any], host: int, options: dict[str, Any], what: str, args: list[Any]
) -> Any:
    """Listen, report the contact, and run the function with the first pipe."""
    listener = _endpoint(suite_ref, host, options).listen()
    try:
        parent.send(listener.contact)
        with listener.accept(timeout=None) as pipe:
            return named(what)(parent, pipe, *args)
    finally:
        listener.close()


def connecting_end(
    parent: Parent, suite_ref: dict[str, Any], host: int, options: dict[str, Any], what: str, args: list[Any]
) -> Any:
    """Connect, and run the function."""
    contact = options.pop("contact")
    with _endpoint(suite_ref, host, options).connect(contact, timeout=waits.patience_s) as pipe:
        return named(what)(parent, pipe, *args)


def dialling_end(
    parent: Parent,
    suite_ref: dict[str, Any],
    host: int,
    options: dict[str, Any],
    contact: str,
    args: list[Any],
) -> list[Any]:
    """Connect; returns the seconds that it took, and the error's class."""
    began = time.monotonic()
    try:
        with _endpoint(suite_ref, host, options).connect(contact, timeout=args[0]):
            error = ""
    except KvplugError as e:
        error = type(e).__name__
    return [time.monotonic() - began, error]


def until_it_ends(parent: Parent, pipe: Pipe, verb: str) -> list[str]:
    """Receive or send until an error; returns its class and text. ``"waits"`` receives on command."""
    parent.send("here")
    if verb == "waits":
        parent.recv(None)
    try:
        while True:
            if verb == "sends":
                pipe.send_tensor(remote.content(0, MIB), timeout=None)
            else:
                pipe.recv_tensor(timeout=None)
    except KvplugError as e:
        return [type(e).__name__, str(e)]


def transfers_end(parent: Parent, pipe: Pipe) -> list[str]:
    """Send more than sockets hold; returns on command how each transfer and then a receive ended."""
    transfers = [pipe.send_tensor(remote.content(number, 8 * MIB)) for number in range(4)]
    parent.send("queued")
    parent.recv(None)
    calls: list[Callable[[], Any]] = [lambda t=transfer: t.wait(None) for transfer in transfers]  # type: ignore[misc]
    return [_error_of(call) for call in (*calls, lambda: pipe.recv_tensor(timeout=None))]


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except KvplugError as e:
        return type(e).__name__
    return ""
