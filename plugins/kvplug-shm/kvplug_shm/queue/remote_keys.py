"""The CURVE keys of a queue's network half: both ends derive them from a shared secret.

What is shared is the deployment's secret, or with TLS alone, where there is none, the random token in the
handle. HKDF-SHA256 (RFC 5869, with :mod:`hmac`) makes Curve25519 secret keys of it: one for the writer and
one for each reader's rank, each with a label of its own, and with a salt that is new for each queue. So the
writer's public key is known only to processes that can prove themselves, a reader's key is valid for one rank
of one queue, and neither reveals anything about the secret.
"""

from __future__ import annotations

import hmac
from typing import Final

import attrs
import zmq
import zmq.utils.z85

from kvplug import TransportError

SALT_BYTES: Final = 16
_LABEL = b"kvplug shm queue 1 "
_KEY_BYTES = 32


@attrs.frozen
class KeyPair:
    """One end's keys as ZeroMQ takes them (Z85). The secret one is in no ``repr``."""

    public: bytes
    secret: bytes = attrs.field(repr=False)

    @property
    def raw_public(self) -> bytes:
        """The public key on the wire and in an authentication request: 32 bytes."""
        return bytes(zmq.utils.z85.decode(self.public))


class Keys:
    """All keys of one queue."""

    def __init__(self, shared: bytes, salt: bytes) -> None:
        """Raises TransportError: the ZeroMQ installed here has no CURVE."""
        if not zmq.has("curve"):
            raise TransportError(
                "the pyzmq installed here was built without CURVE (libsodium), by which the ends of a queue"
                " prove themselves over the network; install one of its wheels"
            )
        self._extracted = hmac.digest(salt, shared, "sha256")

    def __repr__(self) -> str:
        return "<Keys>"

    @property
    def writer(self) -> KeyPair:
        return self._pair(b"writer")

    def reader(self, rank: int) -> KeyPair:
        return self._pair(b"reader %d" % rank)

    def _pair(self, role: bytes) -> KeyPair:
        raw = hmac.digest(self._extracted, _LABEL + role + b"\x01", "sha256")
        assert len(raw) == _KEY_BYTES
        secret = bytes(zmq.utils.z85.encode(raw))
        return KeyPair(bytes(zmq.curve_public(secret)), secret)
