"""How remote readers find a queue's writer: a part of the handle."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvplug import AuthenticationError
from kvplug.transport import Credentials, WireError
from kvplug_shm.queue.remote_keys import SALT_BYTES, Keys

VERSION: Final = 2
PURPOSE: Final = "queue-shm-remote"
"""Of the connections between the two ends."""
_TOKEN_BYTES = 32
_MOST_CHARACTERS = 512


@attrs.frozen(kw_only=True)
class RemoteContact:
    """The contact of the writer's front door, the salt of the keys, and what replaces a missing secret."""

    contact: str
    """For :meth:`kvplug.transport.Connection.dial`."""
    salt: bytes
    token: str = attrs.field(default="", repr=False)
    """In hexadecimal; empty if both ends share a secret."""

    def __str__(self) -> str:
        return self.contact

    def as_plain(self) -> dict[str, Any]:
        """For the handle. It holds the token: not for logs."""
        return {
            "version": VERSION,
            "contact": self.contact,
            "salt": self.salt.hex(),
            "token": self.token,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RemoteContact:
        """The inverse of :meth:`as_plain`.

        Raises:
            WireError: it is anything else. Nothing of it is repeated.
        """
        match plain:
            case {
                "version": int(version),
                "contact": str(contact),
                "salt": str(salt),
                "token": str(token),
            } if version == VERSION and len(contact) <= _MOST_CHARACTERS:
                with contextlib.suppress(ValueError):
                    raw = bytes.fromhex(salt)
                    of_token = len(bytes.fromhex(token))
                    if contact.isprintable() and len(raw) == SALT_BYTES and of_token in (0, _TOKEN_BYTES):
                        return cls(contact=contact, salt=raw, token=token)
        raise WireError("the handle says nothing of the network that this version can read")

    def keys(self, credentials: Credentials) -> Keys:
        """The keys of both ends.

        Raises:
            AuthenticationError: one end has a secret and the other has none.
        """
        if credentials.secret is not None:
            if self.token:
                raise AuthenticationError(
                    f"this end has a secret and the writer at {self} has none; give both ends the same"
                    " (KVPLUG_SECRET or secret_file), or neither"
                )
            return Keys(credentials.secret.reveal(), self.salt)
        if not self.token:
            raise AuthenticationError(
                f"the writer at {self} has a secret and this end has none; give both ends the same"
                " (KVPLUG_SECRET or secret_file)"
            )
        return Keys(bytes.fromhex(self.token), self.salt)


def new_contact(contact: str, credentials: Credentials) -> RemoteContact:
    """A contact of this front door, with a new salt and, where there is no secret, a new token."""
    return RemoteContact(
        contact=contact,
        salt=secrets.token_bytes(SALT_BYTES),
        token="" if credentials.secret is not None else secrets.token_hex(_TOKEN_BYTES),
    )
