"""The mutual challenge, as pure message processing without any input or output.

    client                                         server
    OPENING  version, mode, purpose, nonce  ─────►  is that what is served here? (refusal if not)
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
protect the following bytes from an attacker on the network path, who could also relay the whole exchange.
Without a secret the key is empty, and the kernel (Unix sockets) or TLS authenticates the other end before the
challenge begins.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import struct
from collections.abc import Generator

from kvplug.errors import AuthenticationError, ResourceExhaustedError, WireError
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.identity import IDENTITY_SIZE, PeerIdentity, decode_identity

VERSION = 2
NONCE_SIZE = 32
MAGIC = b"KVPT"
_LABEL = b"kvplug trust 2"
_OPENING = struct.Struct("<4sBBH32s32s")  # magic, version, mode, 0, digest of the purpose, nonce
_REPLY = struct.Struct("<4sBBH32s")  # magic, version, refusal, 0, nonce, proof or the detail of a refusal
OPENING_SIZE = _OPENING.size
REPLY_SIZE = _REPLY.size
PROOF_SIZE = hashlib.sha256().digest_size
_VERDICT = _REPLY.pack(MAGIC, VERSION, 0, 0, b"")[:8]
"""The bytes before the listener's proof."""

Exchange = Generator[tuple[bytes, int], bytes, PeerIdentity]
"""One end of a challenge: yields the bytes to send and the size of the next message, is sent that message,
and returns the identity of the proven peer."""


class Mode(enum.IntEnum):
    """How the other end is authenticated."""

    SECRET = 1
    """It knows the deployment's secret."""
    SAME_USER = 2
    """According to the kernel, the same user is at the other end of a Unix socket."""
    CERTIFICATE = 3
    """TLS alone: it has a certificate from the deployment's own authority."""


class Refusal(enum.IntEnum):
    """Why a listener refuses a connection. Its reply may contain a detail, which the dialling end
    explains."""

    GARBAGE = 1
    """The client does not speak this version of the challenge."""
    PURPOSE = 2
    """The client asked for another service."""
    CREDENTIALS = 3
    """The client's secret or certificate is wrong, or one end has a secret or TLS and the other does not."""
    OTHER_USER = 4
    """The client belongs to another user of this host, or the kernel does not show which user."""
    BUSY = 5
    """There are too many connections, or a resource ran out. The detail names the resource."""
    SILENT = 6
    """The client did not prove itself in time, or hung up. This refusal is never sent."""

    @property
    def reason(self) -> str:
        return self.name.lower().replace("_", " ")


_SAME_SECRET = "give both ends the same one (KVPLUG_SECRET or secret_file)"  # noqa: S105
_SET_TLS = "set tls_cert, tls_key and tls_ca on both ends, or on neither"
# By refusal and detail: the text of the listener's log ("it" is the dialling end), and the dialling end's
# text ("it" is the listener).
_TEXTS: dict[tuple[Refusal, str], tuple[str, str]] = {
    (Refusal.GARBAGE, ""): (
        "it does not speak the challenge: it is not kvplug, or is another version",
        "it could not read our first message; install the same kvplug on both ends",
    ),
    (Refusal.PURPOSE, ""): (
        "it connected for another purpose",
        "it serves another purpose than {purpose!r}; check that the address is the right one",
    ),
    (Refusal.CREDENTIALS, "needs a secret"): (
        f"it has no secret, and this end has one; {_SAME_SECRET}",
        f"it has a secret and this end has none; {_SAME_SECRET}",
    ),
    (Refusal.CREDENTIALS, "has no secret"): (
        f"it has a secret, and this end has none; {_SAME_SECRET}, or neither",
        f"this end has a secret and the listener has none; {_SAME_SECRET}, or neither",
    ),
    (Refusal.CREDENTIALS, "wrong secret"): (
        "its secret differs; check KVPLUG_SECRET or secret_file on both ends",
        "the secrets differ; check KVPLUG_SECRET or secret_file on both ends",
    ),
    (Refusal.CREDENTIALS, "needs TLS"): (
        f"it does not use TLS, and this end does; {_SET_TLS}",
        f"it uses TLS and this end does not; {_SET_TLS}",
    ),
    (Refusal.CREDENTIALS, "has no TLS"): (
        f"it uses TLS, and this end does not; {_SET_TLS}",
        f"this end uses TLS and the listener does not; {_SET_TLS}",
    ),
    (Refusal.OTHER_USER, ""): (
        "it belongs to another user of this host",
        "it belongs to another user of this host; run both ends as one user or with a secret",
    ),
    (Refusal.BUSY, ""): (
        "too many connections at once",
        "it has too many connections, and does not accept them fast enough",
    ),
    (Refusal.SILENT, ""): ("it did not prove itself in time, or hung up", ""),
}


class RefusedError(AuthenticationError):
    """A listener refuses a client; ``reply`` is the message to send to the client."""

    def __init__(self, refusal: Refusal, detail: str = "", text: str = "") -> None:
        super().__init__(text or _TEXTS[refusal, detail][0])
        self.refusal = refusal
        self.reply = _REPLY.pack(MAGIC, VERSION, refusal, 0, detail.encode()[:NONCE_SIZE])

    @classmethod
    def for_lack(cls, shortage: ResourceExhaustedError) -> RefusedError:
        """Return the refusal of a client for which this process lacks a resource."""
        return cls(Refusal.BUSY, shortage.resource, str(shortage))


def prove(key: bytes, role: str, mode: Mode, opening: bytes, answer: bytes, binding: bytes = b"") -> bytes:
    """Return the proof of one role. Every part has a fixed size, so no two inputs are hashed as the same
    bytes.

    ``binding`` identifies the TLS session; empty without TLS.
    """
    derived = hmac.digest(key, _LABEL + b" key " + mode.name.encode(), "sha256")
    transcript = b"".join((_LABEL, _digest(role.encode()), opening, answer, _VERDICT, _digest(binding)))
    return hmac.digest(derived, transcript, "sha256")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def admit(purpose: str, mode: Mode, key: bytes, identity: bytes, binding: bytes = b"") -> Exchange:
    """Run the listener's end of the challenge for one connection. ``binding`` identifies its TLS session.

    Raises:
        RefusedError: the client is refused.
    """
    opening = yield b"", OPENING_SIZE
    magic, version, theirs, reserved, digest, _ = _OPENING.unpack(opening)
    if magic == MAGIC and version != VERSION:
        text = f"it speaks version {version} of the challenge, but ours is {VERSION}"
        raise RefusedError(Refusal.GARBAGE, text=text)
    if magic != MAGIC or reserved or theirs not in list(Mode):
        raise RefusedError(Refusal.GARBAGE)
    if theirs != mode:
        raise RefusedError(Refusal.CREDENTIALS, "needs a secret" if mode is Mode.SECRET else "has no secret")
    if not hmac.compare_digest(digest, _digest(purpose.encode())):
        raise RefusedError(Refusal.PURPOSE, text=f"it connected for another purpose than {purpose!r}")
    answer = _REPLY.pack(MAGIC, VERSION, 0, 0, os.urandom(NONCE_SIZE))
    proof = yield answer, PROOF_SIZE
    if not hmac.compare_digest(proof, prove(key, "client", mode, opening, answer, binding)):
        raise RefusedError(Refusal.CREDENTIALS, "wrong secret")
    message = yield _VERDICT + prove(key, "server", mode, opening, answer, binding) + identity, IDENTITY_SIZE
    try:
        return decode_identity(message)
    except WireError as e:
        raise RefusedError(Refusal.GARBAGE, text=str(e)) from e


def introduce(
    purpose: str, mode: Mode, key: bytes, identity: bytes, where: str, binding: bytes = b""
) -> Exchange:
    """Run the dialling end of the challenge. ``where`` names the listener in messages.

    Raises:
        AuthenticationError: the listener refused us, or did not prove itself.
        ResourceExhaustedError: the listener's process lacks a resource for a connection now.
    """
    opening = _OPENING.pack(MAGIC, VERSION, mode, 0, _digest(purpose.encode()), os.urandom(NONCE_SIZE))
    answer = yield opening, REPLY_SIZE
    _check_reply(answer, purpose, where)
    verdict = yield prove(key, "client", mode, opening, answer, binding), REPLY_SIZE
    proof = _check_reply(verdict, purpose, where)
    if not hmac.compare_digest(proof, prove(key, "server", mode, opening, answer, binding)):
        raise AuthenticationError(
            f"{where} did not prove itself to us: it does not know our secret, or another process is"
            " between us"
        )
    message = yield b"", IDENTITY_SIZE
    try:
        peer = decode_identity(message)
    except WireError as e:
        raise AuthenticationError(f"{where} proved itself, but then sent {e}") from e
    yield identity, 0
    return peer


def _check_reply(message: bytes, purpose: str, where: str) -> bytes:
    """Return the body of a reply that is not a refusal. Raises as :func:`introduce`."""
    magic, version, refusal, reserved, body = _REPLY.unpack(message)
    if magic != MAGIC or (reserved and version == VERSION):
        raise AuthenticationError(f"the server at {where} is not a kvplug listener", code="foreign")
    detail = peer_text(body.rstrip(b"\0").decode("ascii", "replace")) if refusal else ""
    if version != VERSION:
        why = "it speaks another version of the challenge; install the same kvplug on both ends"
    elif refusal == Refusal.BUSY and detail:
        lacks = f"its process has no free descriptor, thread or memory for another connection ({detail})"
        raise ResourceExhaustedError(f"{where} refused us: {lacks}", resource=detail)
    elif (refusal, detail) in _TEXTS:
        why = _TEXTS[Refusal(refusal), detail][1].format(purpose=purpose)
    elif refusal:
        reason = f"number {refusal}: {detail or 'no detail'}"
        why = f"for a reason this version does not know ({reason}); install the same kvplug"
    else:
        return bytes(body)
    code = "tls" if detail in ("needs TLS", "has no TLS") else ""
    raise AuthenticationError(f"{where} refused us: {why}", code=code)
