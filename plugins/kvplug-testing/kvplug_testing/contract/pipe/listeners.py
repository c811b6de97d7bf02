"""Contacts, ``listen`` and ``connect`` (law END-1), and peers that come and go (law END-2)."""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest

from kvplug import AuthenticationError, PeerGoneError
from kvplug.transport import Credentials, PipeListener, Secret, WireError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipePair, PipeSuite, passes, received, sent
from kvplug_testing.waits import Call, raises

_LONGEST_CONTACT: Final = 2000
"""Characters: a contact fits into a log line, an environment variable or a store's value."""
_GARBAGE: Final = ("", "garbage", "https://example.org/", "контакт ☃", "\0\0\0", "\n\n", "x" * MIB)


class Listeners(PipeSuite):
    """Peers in this process that connect to a listener."""

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
    def test_what_is_no_contact_is_refused_with_a_wire_error(self) -> None:
        for contact in _GARBAGE:
            raises(WireError, partial(self.endpoint().connect, contact, timeout=waits.patience_s))

    @law("END-1", needs="other_processes")
    def test_who_cannot_prove_itself_is_refused_and_the_next_is_not(self) -> None:
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
            _greet(pair)

    def _meet(self, count: int, listener: PipeListener) -> list[PipePair]:
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


def _greet(pair: PipePair) -> None:
    """Send one message in each direction."""
    passes(*pair, tensor_of("int32", (3, 2)))
    passes(*pair[::-1], tensor_of("int32", (3, 2)))
