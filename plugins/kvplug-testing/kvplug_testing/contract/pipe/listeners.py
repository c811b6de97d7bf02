"""Contacts and ``connect`` (law END-1), and peers that come and go, die, stop or fork (law END-2).

The general laws judge the errors of calls; here are messages, listeners and ``connect``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from functools import partial
from typing import Any, Final

import pytest

from kvplug import AuthenticationError, PeerGoneError, TimeoutError
from kvplug.kit import Secret
from kvplug.transport import Credentials, Pipe, PipeListener, WireError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import CHILD_S, RUN_END
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.contract.pipe.content import numbered, tensor_of
from kvplug_testing.contract.pipe.ends import PipeGeneral
from kvplug_testing.contract.pipe.suite import MIB, PipePair, passes, received, sent
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call, raises

_KILLS: Final = 6
"""Each with memory of the caller and without."""
_MOMENTS_S: Final = (0.0, 0.004, 0.008, 0.012, None)
"""When a peer is killed or stopped: seconds after it begins to connect; ``None``: once it has connected."""
_LONGEST_CONTACT: Final = 2000
"""Characters: a contact fits into a log line, an environment variable or a store's value."""
_GARBAGE: Final = ("", "garbage", "https://example.org/", "контакт ☃", "\0\0\0", "\n\n", "x" * MIB)


class Listeners(PipeGeneral):
    """Peers that connect to a listener, die, stop or fork."""

    @law("END-1")
    def test_a_contact_is_a_short_line_that_can_be_printed_and_leads_to_its_own_listener(self) -> None:
        end = self.endpoint()
        for listener in [self.listen(), self.listen(end), self.listen(end)]:
            contact = listener.contact
            assert type(contact) is str, f"a contact is a string, not {type(contact).__name__}"
            assert 0 < len(contact) <= _LONGEST_CONTACT, f"a contact of {len(contact)} characters"
            assert contact.isprintable() and contact.strip() == contact, f"not a line: {contact!r}"
            assert listener.contact == contact, "a listener's contact changes"
            _greet(self.join(self.endpoint(), listener))

    @law("END-1")
    def test_a_malformed_contact_is_refused_with_a_wire_error(self) -> None:
        for contact in _GARBAGE:
            raises(WireError, partial(self.endpoint().connect, contact, timeout=waits.patience_s))

    @law("END-1", needs="other_processes")
    def test_an_end_that_cannot_prove_itself_is_refused_and_the_next_is_not(self) -> None:
        if self.spec is None or not self.spec.capabilities.authenticated:
            pytest.skip(f"{self.called} does not claim authenticated")
        ours, theirs, unset = (
            self.endpoint(credentials=each)
            for each in (*(Credentials(Secret(letter * 32)) for letter in "ab"), Credentials())
        )
        listener = self.listen(ours)
        for end in (theirs, unset):
            raises(AuthenticationError, partial(end.connect, listener.contact, timeout=waits.patience_s))
        _greet(self.join(ours, listener))

    @law("END-1", "ALL-2")
    def test_connecting_to_a_closed_listener_fails(self) -> None:
        listener = self.listen()
        connecting = self.connecting(self.endpoint(), listener.contact)
        connecting.is_blocked(0.3)
        Call(listener.close).result()
        raises(PeerGoneError, lambda: connecting.result().recv_tensor(timeout=waits.patience_s))
        raises(PeerGoneError, lambda: self.endpoint().connect(listener.contact, timeout=waits.patience_s))

    @law("END-2", "END-1")
    @pytest.mark.parametrize("how", ["abort", "close"])
    def test_many_connect_at_once_and_pairs_and_a_listener_that_end_disturb_no_other(self, how: str) -> None:
        end, listener = self.endpoint(), self.listen()
        connecting = [self.connecting(end, listener.contact) for _ in range(6)]
        accepted = [self.accept(listener) for _ in connecting]
        connected = [call.result(waits.patience_s + 1) for call in connecting]
        for number, pipe in enumerate(connected):
            sent(pipe, tensor_of("int32", (number,)))
        by_number = {received(pipe).numel(): pipe for pipe in accepted}
        assert sorted(by_number) == [*range(6)], f"6 connected, and these came: {[*by_number]}"
        pairs = [(pipe, by_number[number]) for number, pipe in enumerate(connected)]
        waiting = Call(lambda: pairs[0][0].recv_tensor(timeout=10 * waits.patience_s))
        for which in (0, 1):
            leaving = pairs.pop()
            sent(leaving[0], tensor_of("uint8", (3 * MIB,)))
            Call(leaving[which].abort if how == "abort" else partial(leaving[which].close, 0.1)).result()
        pairs.append(self.join(end, listener))
        Call(listener.close).result()
        assert waiting.is_blocked(0.2), f"a receiver of another pair was disturbed: {waiting.error!r}"
        sent(pairs[0][1], None)
        assert waiting.result() is None
        for pair in pairs:
            _greet(pair)

    # -- in other processes --------------------------------------------------------------------

    @law("ALL-2", needs="other_processes", level="long", timeout_s=120)
    @pytest.mark.parametrize("nbytes", [0, 100, 70_000, 3 * MIB])
    def test_nothing_of_a_message_is_received_if_the_peer_is_killed_while_it_sends(self, nbytes: int) -> None:
        """Kills at many positions in the message, with memory of the caller and without."""
        import torch

        chance = random.Random(nbytes)
        for out in [None, torch.empty(nbytes, dtype=torch.uint8)] * _KILLS:
            with self.scope():
                listener = self.listen()
                arguments = self.suite_ref(), listener.contact, nbytes
                child = self.start_forked(f"{__name__}:send_numbered", *arguments, timeout_s=CHILD_S)
                pipe = self.accept(listener)
                assert_same(numbered(0, nbytes), received(pipe))
                threading.Timer(chance.uniform(0, 0.03), os.kill, (child.pid, signal.SIGKILL)).start()
                for number in itertools.count(1):
                    receiving = Call(partial(pipe.recv_tensor, out, timeout=waits.patience_s))
                    if isinstance(receiving.end(waits.patience_s + 1).error, PeerGoneError):
                        break
                    assert_same(numbered(number, nbytes), receiving.result(), "of a peer that is killed")

    @law("ALL-6", "ALL-5", needs="other_and_forked_processes")
    def test_a_forked_child_connects_anew_and_the_pipe_it_inherited_stays_its_parents(self) -> None:
        one, other = self.pair()
        transfer = one.send_tensor(numbered(1, 40 * MIB))
        called: list[int] = []
        small = numbered(3, 1000)  # a forked child has no threads of torch
        transfer.add_done_callback(lambda _: called.append(os.getpid()))

        def connect() -> str:
            if not transfer.done() or os.getpid() in called:
                return f"the parent's {transfer} is under way, or a callback of the parent's was called"
            passes(*self.pair(), small)
            return ""

        assert not (wrong := in_forked_child(connect)), wrong
        assert_same(numbered(1, 40 * MIB), received(other))
        transfer.wait(waits.patience_s)
        passes(other, one, numbered(5, 50_000))

    @law("END-2", "ALL-2", needs="other_processes")
    @pytest.mark.parametrize("how", ["is killed", "is stopped"])
    def test_a_peer_that_is_killed_or_stopped_delays_no_other(self, how: str) -> None:
        for moment_s in _MOMENTS_S:
            with self.scope():
                listener = self.listen()
                working = self.join(self.endpoint(), listener)
                child = self.start_forked(RUN_END, self.suite_ref(), 1, {}, timeout_s=CHILD_S)
                child.send(listener.contact)
                child.recv() if moment_s is None else time.sleep(moment_s)
                child.kill() if how == "is killed" else child.stop()
                Call(partial(echo_to_all, listener))
                _echoes(self.connecting(self.endpoint(), listener.contact).result())
                _greet(working)

    @law("ALL-3", "ALL-4", needs="other_processes")
    def test_connecting_to_a_stopped_listener_ends_in_time_and_succeeds_when_it_goes_on(self) -> None:
        child = self.start_forked(f"{__name__}:listen", self.suite_ref(), timeout_s=CHILD_S)
        contact = child.recv()
        child.stop()
        for timeout in (0, 0.5):
            connecting = self.connecting(self.endpoint(), contact, timeout).end()
            if connecting.error is not None:  # else the kernel has completed the connection
                assert connecting.took_s > timeout - 0.05, f"connect gave up after {connecting.took_s:.3f} s"
                assert len(str(connecting.raised(TimeoutError))) > 10, "it does not name what it waited for"
        child.cont()
        _echoes(self.connecting(self.endpoint(), contact).result())

    # -- on two hosts, which share no memory, socket names or processes (capability ``cross_host``) --------

    @law("PIPE-1", "END-1", needs="another_host")
    @pytest.mark.parametrize("listening", [0, 1])
    def test_messages_arrive_whole_and_in_order_from_another_host(self, listening: int) -> None:
        ends = self.between_hosts((listening, 1 - listening))
        for number in range(10):
            self.exchange(ends, number)


def _greet(pair: PipePair) -> None:
    """Send one message in each direction."""
    passes(*pair, tensor_of("int32", (3, 2)))
    passes(*pair[::-1], tensor_of("int32", (3, 2)))


def _echoes(pipe: Pipe) -> None:
    """Check that the other end sends a message back."""
    passes(pipe, pipe, numbered(1, 1000))


def echo_to_all(listener: PipeListener) -> None:
    """Accept peers until the listener is closed, and send back what each of them sends until it is gone."""

    def echo(pipe: Pipe) -> None:
        with contextlib.closing(pipe):
            while True:
                pipe.send_tensor(pipe.recv_tensor(timeout=None))

    while True:
        Call(partial(echo, listener.accept(timeout=None)))


# -- in other processes ------------------------------------------------------------------------------


def send_numbered(parent: Parent, suite_ref: dict[str, Any], contact: str, nbytes: int) -> None:
    """Connect, and send numbered messages until it is killed."""
    pipe = suite_from_ref(suite_ref).endpoint().connect(contact)
    for number in itertools.count():
        pipe.send_tensor(numbered(number, nbytes), timeout=None)


def listen(parent: Parent, suite_ref: dict[str, Any]) -> None:
    """Listen, report the contact, and echo until it is killed."""
    listener = suite_from_ref(suite_ref).endpoint().listen()
    parent.send(listener.contact)
    echo_to_all(listener)
