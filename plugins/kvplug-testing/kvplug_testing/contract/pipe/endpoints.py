"""Connecting: contacts, ``listen`` and ``connect`` (law END-1), and peers that come and go (law END-2)."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug import AuthenticationError, PeerGoneError, TimeoutError, TransportError
from kvplug.transport import Credentials, Pipe, PipeEndpoint, PipeListener, Secret, WireError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.waits import Call, raises

_LONGEST_CONTACT = 2000
"""Characters: a contact fits into a log line, an environment variable or a store's value."""
_GARBAGE = {
    "nothing": "",
    "a word": "garbage",
    "spaces": "   ",
    "a link": "https://example.org/",
    "another alphabet": "контакт ☃",
    "zero bytes": "\0\0\0",
    "lines": "\n\n",
    "a megabyte": "x" * MIB,
}
_REFUSALS = (WireError, PeerGoneError, AuthenticationError, TransportError)
"""Errors that a damaged contact may cause: it can still be valid and lead to another listener."""


class Endpoints(PipeSuite):
    """``listen`` and ``connect``."""

    def listen(self, end: PipeEndpoint) -> PipeListener:
        """A listener that is closed at the end of the test."""
        listener = end.listen()
        self.later(listener.close)
        return listener

    @law("END-1")
    def test_a_contact_is_a_short_line_that_can_be_printed(self) -> None:
        listener = self.listen(self.endpoint())
        contact = listener.contact
        assert type(contact) is str, f"a contact is a string, not {type(contact).__name__}"
        assert 0 < len(contact) <= _LONGEST_CONTACT, f"a contact of {len(contact)} characters"
        assert contact.isprintable(), "a contact holds characters that cannot be printed"
        assert contact.strip() == contact, "a contact begins or ends with spaces"
        assert listener.contact == contact, "a listener's contact changes"
        Call(listener.close).result()

    @law("END-1")
    def test_another_endpoint_connects_with_nothing_but_the_contact(self) -> None:
        listener = self.listen(self.endpoint())
        contact = str(listener.contact.encode(), "utf-8")
        accepting = Call(lambda: listener.accept(timeout=10 * waits.patience_s))
        assert accepting.is_blocked(0.1)
        connected = self._kept(Call(lambda: self.endpoint().connect(contact)))
        _greet(connected, self._kept(accepting))

    @law("END-1")
    def test_a_contact_leads_to_its_own_listener(self) -> None:
        end = self.endpoint()
        listeners = [self.listen(end) for _ in range(3)]
        assert len({listener.contact for listener in listeners}) == 3, "two listeners have one contact"
        for listener in listeners:
            connecting = Call(lambda at=listener: end.connect(at.contact))  # type: ignore[misc]
            accepted = self._accepted(listener)
            _greet(self._kept(connecting), accepted)

    @law("END-1")
    @pytest.mark.parametrize("kind", list(_GARBAGE))
    def test_what_is_no_contact_is_refused_with_a_wire_error(self, kind: str) -> None:
        raises(WireError, lambda: self.endpoint().connect(_GARBAGE[kind], timeout=waits.patience_s))

    @law("END-1")
    def test_a_damaged_contact_connects_to_nobody(self) -> None:
        end = self.endpoint()
        listener = self.listen(end)
        contact = listener.contact
        damaged = [contact[: len(contact) // 2], contact[:-1], contact[1:], contact + contact]
        damaged += [contact[:at] + ("z" if contact[at] != "z" else "y") + contact[at + 1 :] for at in (0, -2)]
        for each in damaged:
            call = Call(lambda c=each: end.connect(c, timeout=1.0)).end()  # type: ignore[misc]
            assert call.error is not None, "a damaged contact has led to a pipe"
            allowed = isinstance(call.error, (*_REFUSALS, TimeoutError))
            assert allowed, f"a damaged contact is refused with {call.error!r}"
        connecting = Call(lambda: end.connect(contact))
        accepted = self._accepted(listener)
        _greet(self._kept(connecting), accepted)

    @property
    def proof(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if not self.across_processes:
            return self.other_processes
        claimed = self.spec is not None and self.spec.capabilities.authenticated
        return "" if claimed else f"{self.called} does not claim authenticated"

    @law("END-1", needs="proof")
    def test_who_cannot_prove_itself_is_refused_and_the_next_is_not(self) -> None:
        credentials = [Credentials(Secret(letter * 32)) for letter in "ab"]
        ours, theirs, unset = (
            self.make_endpoint(attrs.evolve(self.context(), credentials=each))
            for each in (*credentials, Credentials())
        )
        listener = self.listen(ours)
        for end in (theirs, unset):
            raises(
                AuthenticationError,
                lambda end=end: end.connect(listener.contact, timeout=waits.patience_s),  # type: ignore[misc]
            )
        connecting = Call(lambda: ours.connect(listener.contact))
        accepted = self._accepted(listener)
        _greet(self._kept(connecting), accepted)

    @law("END-1")
    def test_where_nobody_listens_any_more_nobody_connects(self) -> None:
        end = self.endpoint()
        listener = end.listen()
        Call(listener.close).result()
        raises(PeerGoneError, lambda: end.connect(listener.contact, timeout=waits.patience_s))

    @law("END-1", "ALL-2")
    def test_whom_nobody_has_accepted_learns_that_the_listener_is_closed(self) -> None:
        end = self.endpoint()
        listener = self.listen(end)
        connecting = Call(lambda: end.connect(listener.contact, timeout=10 * waits.patience_s))
        connecting.is_blocked(0.3)
        Call(listener.close).result()
        call = connecting.end()
        if call.error is None:
            self.later(call.value.abort)
            raises(PeerGoneError, lambda: call.value.recv_tensor(timeout=10 * waits.patience_s))
        else:
            call.raised(PeerGoneError)

    # -- coming and going ----------------------------------------------------------------------

    @law("END-2", "END-1")
    def test_many_connect_at_once_over_one_contact(self) -> None:
        self._meet(6)

    @law("END-2")
    @pytest.mark.parametrize("how", ["abort", "close"])
    @pytest.mark.parametrize("which", [0, 1], ids=["the end that connected", "the end that accepted"])
    def test_a_pair_that_ends_in_the_middle_disturbs_no_other(self, how: str, which: int) -> None:
        listener, pairs = self._meet(4)
        leaving = pairs.pop(1)
        sent(leaving[0], tensor_of("uint8", (3 * MIB,)))
        waiting = [Call(lambda p=a: p.recv_tensor(timeout=10 * waits.patience_s)) for a, _ in pairs]  # type: ignore[misc]
        going = Call(lambda: _go(pairs[0][0], pairs[0][1], 200))
        Call(leaving[which].abort if how == "abort" else lambda: leaving[which].close(timeout=0.1)).result()
        going.result(waits.patience_s + 20)
        for (one, other), call in zip(pairs, waiting, strict=True):
            assert call.is_blocked(0.0), f"a receiver of another pair was disturbed: {call.error!r}"
            message = tensor_of("int32", (4,))
            sent(other, message)
            assert_same(message, call.result())
            assert not (one.closed or other.closed)
        self._meet(1, listener)

    @law("END-2")
    def test_pipes_live_on_when_their_listener_is_closed(self) -> None:
        listener, pairs = self._meet(3)
        waiting = Call(lambda: pairs[0][0].recv_tensor(timeout=10 * waits.patience_s))
        assert waiting.is_blocked(0.1)
        Call(listener.close).result()
        assert waiting.is_blocked(0.2), f"a receiver ended with its listener: {waiting.error!r}"
        sent(pairs[0][1], None)
        assert waiting.result() is None
        for one, other in pairs:
            _greet(one, other)

    def _meet(
        self, count: int, listener: PipeListener | None = None
    ) -> tuple[PipeListener, list[tuple[Pipe, Pipe]]]:
        """Pairs that connect at the same time: the connecting end and the accepting end."""
        end = self.endpoint()
        listener = self.listen(end) if listener is None else listener
        contact = listener.contact
        connecting = [Call(lambda: end.connect(contact)) for _ in range(count)]
        accepted = [self._accepted(listener) for _ in range(count)]
        connected = [self._kept(call) for call in connecting]
        for number, pipe in enumerate(connected):
            sent(pipe, tensor_of("int32", (number,)))
        by_number = {received(pipe).numel(): pipe for pipe in accepted}
        assert sorted(by_number) == [*range(count)], f"{count} connected, and these came: {[*by_number]}"
        for number, pipe in by_number.items():
            sent(pipe, tensor_of("int8", (number,)))
        for number, pipe in enumerate(connected):
            assert received(pipe).numel() == number, "an answer came to another pipe than the one that asked"
        return listener, [(pipe, by_number[number]) for number, pipe in enumerate(connected)]

    def _accepted(self, listener: PipeListener) -> Pipe:
        within = waits.patience_s
        return self._kept(Call(lambda: listener.accept(timeout=within)))

    def _kept(self, call: Call) -> Pipe:
        pipe: Any = call.result(waits.patience_s + 1)
        assert isinstance(pipe, Pipe), f"{pipe!r} is no kvplug.transport.Pipe"
        self.later(pipe.abort)
        return pipe


def _greet(one: Pipe, other: Pipe) -> None:
    """Send one message in each direction."""
    for sender, receiver in ((one, other), (other, one)):
        message = tensor_of("int32", (3, 2))
        sent(sender, message)
        assert_same(message, received(receiver))


def _go(one: Pipe, other: Pipe, count: int) -> None:
    """Send many messages in one direction."""
    for number in range(count):
        message = tensor_of("uint8", (number % 50 * 1000,), seed=number)
        one.send_tensor(message, timeout=waits.patience_s)
        lost = difference(message, other.recv_tensor(timeout=waits.patience_s))
        assert not lost, f"message {number} of a pair that was not ended: {lost}"
