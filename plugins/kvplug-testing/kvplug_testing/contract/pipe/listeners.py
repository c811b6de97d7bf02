"""Contacts, ``listen`` and ``connect`` (law END-1), and peers that come and go (law END-2)."""

from __future__ import annotations

import time
from functools import partial

import attrs
import pytest

from kvplug import AuthenticationError, PeerGoneError, TimeoutError
from kvplug.transport import Credentials, Pipe, PipeListener, Secret, WireError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.waits import Call, raises

_LONGEST_CONTACT = 2000
"""Characters: a contact fits into a log line, an environment variable or a store's value."""
_GARBAGE = ("", "garbage", "https://example.org/", "контакт ☃", "\0\0\0", "\n\n", "x" * MIB)


class Listeners(PipeSuite):
    """Peers in this process, and in others, that connect to a listener."""

    def listen(self) -> PipeListener:
        """A listener that is closed at the end of the test."""
        listener = self.endpoint().listen()
        self.later(listener.close)
        return listener

    @law("END-1")
    def test_a_contact_is_a_short_line_that_can_be_printed_and_leads_to_its_own_listener(self) -> None:
        end = self.endpoint()
        listeners = [self.listen(), end.listen(), end.listen()]
        for listener in listeners:
            self.later(listener.close)
            contact = listener.contact
            assert type(contact) is str, f"a contact is a string, not {type(contact).__name__}"
            assert 0 < len(contact) <= _LONGEST_CONTACT, f"a contact of {len(contact)} characters"
            assert contact.isprintable() and contact.strip() == contact, f"not a line: {contact!r}"
            assert listener.contact == contact, "a listener's contact changes"
            _greet(*self.join(self.endpoint(), listener))

    @law("END-1")
    def test_what_is_no_contact_is_refused_with_a_wire_error(self) -> None:
        for contact in _GARBAGE:
            raises(WireError, lambda c=contact: self.endpoint().connect(c, timeout=waits.patience_s))  # type: ignore[misc]

    @property
    def proof(self) -> str:
        """The reason to skip a test, for ``needs``."""
        claimed = self.spec is not None and self.spec.capabilities.authenticated
        return self.other_processes or ("" if claimed else f"{self.called} does not claim authenticated")

    @law("END-1", needs="proof")
    def test_who_cannot_prove_itself_is_refused_and_the_next_is_not(self) -> None:
        ours, theirs, unset = (
            self.make_endpoint(attrs.evolve(self.context(), credentials=each))
            for each in (*(Credentials(Secret(letter * 32)) for letter in "ab"), Credentials())
        )
        listener = ours.listen()
        self.later(listener.close)
        for end in (theirs, unset):
            raises(
                AuthenticationError,
                lambda end=end: end.connect(listener.contact, timeout=waits.patience_s),  # type: ignore[misc]
            )
        _greet(*self.join(ours, listener))

    @law("END-1", "ALL-2")
    def test_where_nobody_listens_any_more_nobody_connects(self) -> None:
        listener = self.listen()
        connecting = Call(lambda: self.endpoint().connect(listener.contact, timeout=10 * waits.patience_s))
        connecting.is_blocked(0.3)
        Call(listener.close).result()
        if connecting.end().error is None:
            self.later(connecting.value.abort)
            raises(PeerGoneError, lambda: connecting.value.recv_tensor(timeout=10 * waits.patience_s))
        else:
            connecting.raised(PeerGoneError)
        raises(PeerGoneError, lambda: self.endpoint().connect(listener.contact, timeout=waits.patience_s))

    # -- coming and going ----------------------------------------------------------------------

    @law("END-2", "END-1")
    @pytest.mark.parametrize("how", ["abort", "close"])
    def test_many_connect_at_once_and_pairs_and_a_listener_that_end_disturb_no_other(self, how: str) -> None:
        listener = self.listen()
        pairs = self._meet(6, listener)
        waiting = Call(lambda: pairs[0][0].recv_tensor(timeout=10 * waits.patience_s))
        for which in (0, 1):
            leaving = pairs.pop()
            sent(leaving[0], tensor_of("uint8", (3 * MIB,)))
            Call(leaving[which].abort if how == "abort" else partial(leaving[which].close, 0.1)).result()
        pairs += self._meet(1, listener)
        Call(listener.close).result()
        assert waiting.is_blocked(0.2), f"a receiver of another pair was disturbed: {waiting.error!r}"
        sent(pairs[0][1], None)
        assert waiting.result() is None
        for pair in pairs:
            _greet(*pair)

    def _meet(self, count: int, listener: PipeListener) -> list[tuple[Pipe, Pipe]]:
        """Pairs that connect at the same time: the connecting end and the accepting end."""
        end = self.endpoint()
        connecting = [Call(lambda: end.connect(listener.contact)) for _ in range(count)]
        accepted = [self.accept(listener) for _ in range(count)]
        connected = [call.result(waits.patience_s + 1) for call in connecting]
        for number, pipe in enumerate(connected):
            self.later(pipe.abort)
            sent(pipe, tensor_of("int32", (number,)))
        by_number = {received(pipe).numel(): pipe for pipe in accepted}
        assert sorted(by_number) == [*range(count)], f"{count} connected, and these came: {[*by_number]}"
        return [(pipe, by_number[number]) for number, pipe in enumerate(connected)]

    # -- other processes -----------------------------------------------------------------------

    @law("END-2", "ALL-2", "ALL-3", needs="other_processes")
    @pytest.mark.parametrize(
        "how",
        [
            "is killed while it connects",
            "is killed before it is accepted",
            "is killed later",
            "is stopped while it connects",
        ],
    )
    def test_a_peer_that_is_killed_or_stopped_holds_up_nobody(self, how: str) -> None:
        listener = self.listen()
        working = self._hello(listener, 0)
        for number in range(1, 5):
            child = self.connecting(listener.contact, remote.wait)
            if how.endswith("while it connects"):
                time.sleep(0.004 * (number - 1))
            else:
                child.recv()
            pipe = self.accept(listener) if how.endswith("later") else None
            child.stop() if "stopped" in how else child.kill()
            if pipe is not None:
                raises(PeerGoneError, partial(pipe.recv_tensor, timeout=waits.patience_s))
            _echoes(self._hello(listener, number), 1)
            _echoes(working, number)

    def _hello(self, listener: PipeListener, number: int) -> Pipe:
        """The pipe of a new peer. Those that were killed or stopped may be accepted before."""
        self.connecting(listener.contact, remote.hello, number)
        while True:
            pipe = self.accept(listener)
            receiving = Call(partial(pipe.recv_tensor, timeout=3.0)).end()
            if receiving.error is None:
                assert not (wrong := remote.unlike(receiving.value, number, 1000)), wrong
                return pipe
            assert isinstance(receiving.error, PeerGoneError | TimeoutError), receiving.error

    @law("ALL-3", "ALL-4", needs="other_processes")
    def test_connecting_to_a_stopped_listener_ends_in_time_and_succeeds_when_it_goes_on(self) -> None:
        contact, child = self.remote_listener(remote.accept_without_end)
        child.stop()
        end = self.endpoint()
        for timeout in (0, 0.5):
            connecting = Call(partial(end.connect, contact, timeout=timeout)).end()
            if connecting.error is None:  # the kernel completed the connection
                connecting.value.abort()
            else:
                assert connecting.took_s > timeout - 0.05, f"connect gave up after {connecting.took_s:.3f} s"
                assert len(str(connecting.raised(TimeoutError))) > 10, "it does not say what it waited for"
        child.cont()
        pipe = Call(partial(end.connect, contact, timeout=waits.patience_s)).result(waits.patience_s + 1)
        self.later(pipe.abort)
        _echoes(pipe, 1)


def _greet(one: Pipe, other: Pipe) -> None:
    """Send one message in each direction."""
    for sender, receiver in ((one, other), (other, one)):
        message = tensor_of("int32", (3, 2))
        sent(sender, message)
        assert_same(message, received(receiver))


def _echoes(pipe: Pipe, number: int) -> None:
    """The other end, which echoes, is alive."""
    pipe.send_tensor(remote.content(number, 1000))
    assert not (wrong := remote.unlike(received(pipe), number, 1000)), wrong
