"""The challenge as pure messages: what an attacker who holds the wire can and cannot make of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug.errors import AuthenticationError
from kvplug.net.trust.challenge import (
    OPENING_SIZE,
    REPLY_SIZE,
    Exchange,
    Mode,
    Refusal,
    RefusedError,
    admit,
    introduce,
    prove,
)
from kvplug.net.trust.identity import IDENTITY_SIZE, PeerIdentity, encode_identity

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
IDENTITY = encode_identity(PeerIdentity.of_this_process("test"))


class End:
    """One end, to which messages are fed."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.outgoing, self.need = next(exchange)
        self.peer: PeerIdentity | None = None

    def feed(self, message: bytes) -> bytes:
        assert len(message) == self.need
        try:
            self.outgoing, self.need = self._exchange.send(message)
        except StopIteration as proven:
            self.outgoing, self.need, self.peer = b"", 0, proven.value
        return self.outgoing


def server(purpose: str = "group", mode: Mode = Mode.SECRET, key: bytes = KEY, binding: bytes = b"") -> End:
    return End(admit(purpose, mode, key, IDENTITY, binding))


def client(purpose: str = "group", mode: Mode = Mode.SECRET, key: bytes = KEY, binding: bytes = b"") -> End:
    return End(introduce(purpose, mode, key, IDENTITY, "unix:@x", binding))


@pytest.mark.parametrize("mode", list(Mode))
def test_two_ends_that_have_the_same_key_prove_it_to_each_other(mode: Mode) -> None:
    c, s = client(mode=mode), server(mode=mode)
    verdict = s.feed(c.feed(s.feed(c.outgoing)))
    assert c.feed(verdict[:REPLY_SIZE]) == b""
    assert s.feed(c.feed(verdict[REPLY_SIZE:])) == b""
    assert c.feed(b"") == b""
    assert c.peer == s.peer == PeerIdentity.of_this_process("test")
    assert c.need == s.need == 0


def test_a_listener_that_accepts_every_peer_without_having_the_key_is_detected() -> None:
    c, rogue = client(), server(key=OTHER_KEY)
    answer = rogue.feed(c.outgoing)
    c.feed(answer)
    made_up = answer[:8] + b"\x01" * 32
    with pytest.raises(AuthenticationError, match="did not prove itself"):
        c.feed(made_up)


def test_a_recorded_proof_is_not_accepted_a_second_time() -> None:
    c, s = client(), server()
    opening = c.outgoing
    proof = c.feed(s.feed(opening))
    s.feed(proof)
    again = server()
    again.feed(opening)
    with pytest.raises(RefusedError):
        again.feed(proof)


def test_a_proof_reflected_to_its_maker_is_refused() -> None:
    """The attacker knows no key. It dials a listener and listens for a client of the same deployment, and
    hands each one's messages back to itself."""
    c = client()
    # The client's own nonce comes back to it as the listener's, and its own proof as the listener's proof.
    opening = c.outgoing
    nonce = opening[-32:]
    proof = c.feed(opening[:5] + b"\0\0\0" + nonce)
    with pytest.raises(AuthenticationError, match="did not prove itself"):
        c.feed(opening[:5] + b"\0\0\0" + proof)


def test_no_proof_of_one_role_mode_message_or_session_serves_as_another() -> None:
    a, b = b"a" * OPENING_SIZE, b"b" * OPENING_SIZE
    proofs = [
        prove(key, role, mode, *messages, binding)
        for key in (KEY, OTHER_KEY)
        for role in ("client", "server")
        for mode in Mode
        for messages in ((a, b), (b, a), (a, a))
        for binding in (b"", b"one session", b"another")
    ]
    assert len(set(proofs)) == len(proofs)


def test_a_byte_that_is_changed_on_the_way_is_noticed_before_both_are_proven() -> None:
    """Also a reserved byte: of the opening, of the answer, and before the listener's proof."""

    def changed(message: bytes, at: int) -> bytes:
        data = bytearray(message)
        if 0 <= at < len(data):
            data[at] ^= 1
        return bytes(data)

    for at in range(OPENING_SIZE + REPLY_SIZE + 8):
        c, s = client(), server()
        with pytest.raises(AuthenticationError):
            answer = changed(s.feed(changed(c.outgoing, at)), at - OPENING_SIZE)
            verdict = s.feed(c.feed(answer))
            c.feed(changed(verdict[:8], at - OPENING_SIZE - REPLY_SIZE) + verdict[8:REPLY_SIZE])


def test_the_ends_of_two_tls_sessions_do_not_prove_themselves_to_each_other() -> None:
    """A process with a certificate of the same authority stands between them."""
    c, s = client(binding=b"session 1"), server(binding=b"session 2")
    with pytest.raises(RefusedError) as refused:
        s.feed(c.feed(s.feed(c.outgoing)))
    assert refused.value.refusal is Refusal.CREDENTIALS


UNFIT = [
    ({"key": OTHER_KEY}, Mode.SECRET, Refusal.CREDENTIALS, "KVPLUG_SECRET or secret_file"),
    ({"purpose": "control"}, Mode.SECRET, Refusal.PURPOSE, "another purpose than 'control'"),
    ({"mode": Mode.SAME_USER}, Mode.SECRET, Refusal.CREDENTIALS, "it has a secret"),
    ({"mode": Mode.CERTIFICATE}, Mode.SECRET, Refusal.CREDENTIALS, "it has a secret"),
    ({"mode": Mode.SECRET}, Mode.SAME_USER, Refusal.CREDENTIALS, "the listener has none"),
    ({"mode": Mode.SECRET}, Mode.CERTIFICATE, Refusal.CREDENTIALS, "the listener has none"),
]


@pytest.mark.parametrize(("theirs", "ours", "refusal", "message"), UNFIT)
def test_a_client_that_does_not_fit_is_refused_with_what_to_check(
    theirs: dict[str, Any], ours: Mode, refusal: Refusal, message: str
) -> None:
    """All but a wrong secret before it proves anything."""
    c, s = client(**theirs), server(mode=ours)
    with pytest.raises(RefusedError) as refused:
        s.feed(c.feed(s.feed(c.outgoing)))
    assert refused.value.refusal is refusal
    assert (s.need == OPENING_SIZE) is ("key" not in theirs)
    with pytest.raises(AuthenticationError, match=message):
        c.feed(refused.value.reply)


def test_another_version_is_named() -> None:
    s = server()
    opening = bytearray(client().outgoing)
    opening[4] = 9
    with pytest.raises(RefusedError, match="version 9") as refused:
        s.feed(bytes(opening))
    assert refused.value.refusal is Refusal.GARBAGE
    for version in (2, 9):  # of the listener
        reply = bytearray(refused.value.reply)
        reply[4] = version
        with pytest.raises(AuthenticationError, match="install the same kvplug"):
            client().feed(bytes(reply))


@given(st.binary(min_size=OPENING_SIZE, max_size=OPENING_SIZE))
def test_garbage_is_refused_by_both(message: bytes) -> None:
    with pytest.raises(RefusedError):
        server().feed(message)
    with pytest.raises(AuthenticationError, match="not a kvplug listener"):
        client().feed(message[:REPLY_SIZE])


@given(st.binary(min_size=IDENTITY_SIZE, max_size=IDENTITY_SIZE))
def test_an_identity_of_garbage_is_refused_even_after_the_proof(message: bytes) -> None:
    c, s = client(), server()
    s.feed(c.feed(s.feed(c.outgoing)))
    with pytest.raises(RefusedError):
        s.feed(message)
