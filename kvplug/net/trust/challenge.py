"""The mutual challenge, without any input or output: messages in, messages out.

    client                                         server
    OPENING  version, mode, purpose, nonce  ─────►  is that mode enough here? (refusal if not)
                                            ◄─────  ANSWER   nonce
    PROOF    HMAC(key, "client", …)         ─────►  compared in constant time (refusal if wrong)
                                            ◄─────  VERDICT  HMAC(key, "server", …), then IDENTITY
    IDENTITY                                ─────►  proven

Every message has a fixed size, so an unproven client cannot make the listener allocate memory. The client
proves first: a listener never shows a keyed hash to a client that does not know the key. Each proof covers
every byte of OPENING and ANSWER: both nonces (no replay), the mode, the purpose (a proof made for one service
is not valid for another) and the reserved bytes, which must be zero. It also covers the prover's role (no
reflection) and the TLS session that carries the connection, if there is one (no relay from another session).

The challenge proves the identity of the other end when the connection is made. Without TLS it does not
protect the bytes that follow against an attacker on the network path, which could also relay the whole
exchange.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Mapping
from typing import Self

from kvplug.errors import AuthenticationError, ResourceExhaustedError, WireError
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.identity import IDENTITY_SIZE, PeerIdentity, decode_identity

VERSION = 2
NONCE_SIZE = 32
MAGIC = b"KVPT"
_LABEL = b"kvplug trust 2"
_OPENING = struct.Struct("<4sBBH32s32s")  # magic, version, mode, 0, digest of the purpose, nonce
_REPLY = struct.Struct("<4sBBH32s")  # magic, version, refusal, 0, nonce or proof
OPENING_SIZE = _OPENING.size
REPLY_SIZE = _REPLY.size
PROOF_SIZE = hashlib.sha256().digest_size
_VERDICT = _REPLY.pack(MAGIC, VERSION, 0, 0, b"")[:8]
"""What stands before the listener's proof."""


class Mode(enum.IntEnum):
    """What is proved."""

    SECRET = 1
    """Knowledge of the deployment's secret."""
    TOKEN = 2
    """Knowledge of the token in a loopback contact."""
    SAME_USER = 3
    """The kernel's word: the same user, on the same host."""


class Refusal(enum.IntEnum):
    """Why a listener refused a connection. It counts refusals by these names, in lower case."""

    NONE = 0
    GARBAGE = 1
    VERSION = 2
    PURPOSE = 3
    SECRET_NEEDED = 4
    NO_SECRET_HERE = 5
    MODE = 6
    WRONG_SECRET = 7
    WRONG_TOKEN = 8
    OTHER_USER = 9
    UNKNOWN_USER = 10
    CROWDED = 11
    TLS_NEEDED = 12
    NO_TLS_HERE = 13
    EXHAUSTED = 14
    # Never sent, only counted:
    SILENT = 64
    LEFT = 65
    TLS_FAILED = 66

    @property
    def reason(self) -> str:
        return self.name.lower().replace("_", " ")


_SET_TLS = "set tls_cert, tls_key and tls_ca on both ends, or on neither"
_GIVE_BOTH = "give both ends the same (KVPLUG_SECRET or secret_file)"

_ADVICE = {  # for the dialling end; "it" is the listener
    Refusal.GARBAGE: "it could not read our first message",
    Refusal.VERSION: "it speaks another version of the challenge; install the same kvplug on both ends",
    Refusal.PURPOSE: "it serves another purpose than {purpose!r}; check that the port is the right one",
    Refusal.SECRET_NEEDED: f"it has a secret and this end has none; {_GIVE_BOTH}",
    Refusal.NO_SECRET_HERE: f"this end has a secret and the listener has none; {_GIVE_BOTH}, or neither",
    Refusal.MODE: "it does not accept this way of proving; use its whole contact (with the token)",
    Refusal.WRONG_SECRET: "the secrets differ; check KVPLUG_SECRET or secret_file on both ends",
    Refusal.WRONG_TOKEN: "the token is not its own; the contact may be of an earlier run: get a new one",
    Refusal.OTHER_USER: "it belongs to another user of this host; run both ends as one user or with a secret",
    Refusal.UNKNOWN_USER: "the kernel does not tell it which user this end is; use its whole contact (with"
    " the token) or give both ends a secret",
    Refusal.CROWDED: "it has as many connections as it takes, and does not accept them fast enough",
    Refusal.TLS_NEEDED: f"it uses TLS and this end does not; {_SET_TLS}",
    Refusal.NO_TLS_HERE: f"this end uses TLS and the listener does not; {_SET_TLS}",
    Refusal.EXHAUSTED: "its process has no free descriptor, thread or memory for another connection",
}

_SEEN_HERE = {  # for the listener; "it" is the dialling end
    Refusal.GARBAGE: "it does not speak the challenge: no kvplug, or another one",
    Refusal.SECRET_NEEDED: f"it has no secret, and this end has one; {_GIVE_BOTH}",
    Refusal.NO_SECRET_HERE: f"it has a secret, and this end has none; {_GIVE_BOTH}, or neither",
    Refusal.MODE: "it asked for a way of proving that is not enough here",
    Refusal.WRONG_SECRET: "its secret is another one; check KVPLUG_SECRET or secret_file on both ends",
    Refusal.WRONG_TOKEN: "its token is not ours: it may have the contact of an earlier run",
    Refusal.CROWDED: "too many connections at once",
    Refusal.TLS_NEEDED: f"it does not use TLS, and this end does; {_SET_TLS}",
    Refusal.NO_TLS_HERE: f"it uses TLS, and this end does not; {_SET_TLS}",
    Refusal.SILENT: "it did not prove itself in time",
    Refusal.LEFT: "it hung up before it had proved itself",
}


class RefusedError(AuthenticationError):
    """A listener refuses a client; ``reply`` is the message to send to it."""

    def __init__(self, refusal: Refusal, text: str = "", *, lacks: str = "") -> None:
        """``lacks``: the resource that ran out here, for ``EXHAUSTED``."""
        super().__init__(text or _SEEN_HERE.get(refusal, refusal.reason))
        self.refusal = refusal
        self._lacks = lacks

    @property
    def reply(self) -> bytes:
        return _REPLY.pack(MAGIC, VERSION, self.refusal, 0, self._lacks.encode()[:NONCE_SIZE])

    @classmethod
    def for_lack(cls, shortage: ResourceExhaustedError) -> Self:
        """The refusal of a client that this process has no resource for."""
        return cls(Refusal.EXHAUSTED, str(shortage), lacks=shortage.resource)


def advice(refusal: int, purpose: str) -> str:
    """What a refused client should check."""
    try:
        return _ADVICE[Refusal(refusal)].format(purpose=purpose)
    except (ValueError, KeyError):
        return f"for a reason this version does not know (number {refusal}); install the same kvplug"


def prove(key: bytes, role: str, mode: Mode, opening: bytes, answer: bytes, binding: bytes = b"") -> bytes:
    """The proof of one role. Every part has a fixed size, so no two inputs give the same bytes.

    ``binding`` identifies the TLS session; empty without TLS.
    """
    derived = hmac.digest(key, _LABEL + b" key " + mode.name.encode(), "sha256")
    transcript = b"".join((_LABEL, _digest(role.encode()), opening, answer, _VERDICT, _digest(binding)))
    return hmac.digest(derived, transcript, "sha256")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class ServerChallenge:
    """One unproven connection, seen by the listener.

    ``keys`` are the modes this listener accepts. ``attest`` is asked in mode SAME_USER: it returns
    normally if the kernel says that the peer is the same user, and raises :class:`RefusedError` if not.
    ``binding`` identifies the TLS session that carries the connection.
    """

    def __init__(
        self,
        purpose: str,
        keys: Mapping[Mode, bytes],
        identity: bytes,
        attest: Callable[[], None],
        binding: bytes = b"",
    ) -> None:
        self._purpose = purpose
        self._keys = keys
        self._identity = identity
        self._attest = attest
        self._binding = binding
        self._answer = _REPLY.pack(MAGIC, VERSION, Refusal.NONE, 0, os.urandom(NONCE_SIZE))
        self._opened = b""
        self._proved = False
        self.mode: Mode | None = None
        self.peer: PeerIdentity | None = None
        """Set when the peer is proven."""
        self.need = OPENING_SIZE
        """Size of the next message that :meth:`feed` takes."""

    def feed(self, message: bytes) -> bytes:
        """Take one message of exactly ``need`` bytes, return what to send back.

        Raises:
            RefusedError: the peer is refused.
        """
        if self.mode is None:
            return self._opening(message)
        if not self._proved:
            return self._proof(message)
        try:
            self.peer = decode_identity(message)
        except WireError as e:
            raise RefusedError(Refusal.GARBAGE, str(e)) from e
        self.need = 0
        return b""

    def _opening(self, message: bytes) -> bytes:
        magic, version, number, reserved, purpose, _ = _OPENING.unpack(message)
        if magic != MAGIC:
            raise RefusedError(Refusal.GARBAGE)
        if version != VERSION:
            raise RefusedError(
                Refusal.VERSION, f"it speaks version {version} of the challenge, ours is {VERSION}"
            )
        if reserved:
            raise RefusedError(Refusal.GARBAGE)
        if number not in self._keys:
            if Mode.SECRET in self._keys:
                raise RefusedError(Refusal.SECRET_NEEDED)
            raise RefusedError(Refusal.NO_SECRET_HERE if number == Mode.SECRET else Refusal.MODE)
        if not hmac.compare_digest(purpose, _digest(self._purpose.encode())):
            raise RefusedError(Refusal.PURPOSE, f"it came for something else than {self._purpose!r}")
        mode = Mode(number)
        if mode is Mode.SAME_USER:
            self._attest()
        self.mode = mode
        self._opened = message
        self.need = PROOF_SIZE
        return self._answer

    def _proof(self, message: bytes) -> bytes:
        assert self.mode is not None
        key = self._keys[self.mode]
        said = self.mode, self._opened, self._answer, self._binding
        if not hmac.compare_digest(message, prove(key, "client", *said)):
            raise RefusedError(Refusal.WRONG_TOKEN if self.mode is Mode.TOKEN else Refusal.WRONG_SECRET)
        self._proved = True
        self.need = IDENTITY_SIZE
        return _VERDICT + prove(key, "server", *said) + self._identity


class ClientChallenge:
    """The same connection, seen by the dialling end. ``where`` names the listener in messages."""

    def __init__(
        self,
        purpose: str,
        mode: Mode,
        key: bytes,
        identity: bytes,
        attest: Callable[[], None],
        where: str,
        binding: bytes = b"",
    ) -> None:
        self._purpose = purpose
        self._mode = mode
        self._key = key
        self._identity = identity
        self._attest = attest
        self._where = where
        self._binding = binding
        digest, nonce = _digest(purpose.encode()), os.urandom(NONCE_SIZE)
        self._opening = _OPENING.pack(MAGIC, VERSION, mode, 0, digest, nonce)
        self._answer = b""
        self._verdict_seen = False
        self.peer: PeerIdentity | None = None
        self.need = REPLY_SIZE

    def opening(self) -> bytes:
        """The first message."""
        return self._opening

    def feed(self, message: bytes) -> bytes:
        """Take one message of exactly ``need`` bytes, return what to send back.

        Raises:
            AuthenticationError: we were refused, or the listener did not prove itself.
            ResourceExhaustedError: the listener's process has no resources for a connection now.
        """
        if self._verdict_seen:
            try:
                self.peer = decode_identity(message)
            except WireError as e:
                raise AuthenticationError(f"{self._where} proved itself and then sent {e}") from e
            self.need = 0
            return self._identity
        magic, version, refusal, reserved, body = _REPLY.unpack(message)
        if magic != MAGIC:
            raise AuthenticationError(f"what answers at {self._where} is not a kvplug listener")
        if refusal == Refusal.EXHAUSTED:
            lacks = peer_text(body.rstrip(b"\0").decode("ascii", "replace")) or "resources"
            raise ResourceExhaustedError(
                f"{self._where} refused us: {advice(refusal, self._purpose)} ({lacks})", resource=lacks
            )
        if refusal:
            raise AuthenticationError(f"{self._where} refused us: {advice(refusal, self._purpose)}")
        if version != VERSION:
            raise AuthenticationError(f"{self._where} refused us: {advice(Refusal.VERSION, self._purpose)}")
        if reserved:
            raise AuthenticationError(f"what answers at {self._where} is not a kvplug listener")
        if not self._answer:
            if self._mode is Mode.SAME_USER:
                self._attest()
            self._answer = message
            return prove(self._key, "client", self._mode, self._opening, message, self._binding)
        proof = prove(self._key, "server", self._mode, self._opening, self._answer, self._binding)
        if not hmac.compare_digest(body, proof):
            raise AuthenticationError(
                f"{self._where} did not prove itself to us: it does not know our"
                f" {'token' if self._mode is Mode.TOKEN else 'secret'}, or another process is between us"
            )
        self._verdict_seen = True
        self.need = IDENTITY_SIZE
        return b""
