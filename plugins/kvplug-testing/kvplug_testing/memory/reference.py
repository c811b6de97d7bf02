"""References to entries that the connector "memory" has leased. They travel through a client's request.

A reference names the owner (engine, its epoch, its address), the entry (lease, request, generation, tokens)
and the expiry time. The ticket is an HMAC over all of these. The key and the entries never leave this
process; a connector between processes derives its key from the secret that both ends share.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from typing import Any, Final

import attrs

from kvplug import UnsupportedError
from kvplug.kit import Reason
from kvplug.net.wire import encode

_KEY: Final = os.urandom(32)


class StaleError(Exception):
    """The reference is not valid; it is counted with ``reason``."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def _is(kind: type) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if type(value) is not kind or (type(value) is int and not 0 <= value < 1 << 63):
            raise StaleError(Reason.REFUSED, f"{attribute.name} is {value!r:.60}")

    return attrs.field(validator=check)


@attrs.frozen(kw_only=True)
class Reference:
    """A reference, without its ticket."""

    engine_id: str = _is(str)
    epoch: str = _is(str)
    """The epoch of the engine's start."""
    contact: str = _is(str)
    request_id: str = _is(str)
    generation: int = _is(int)
    lease: int = _is(int)
    num_tokens: int = _is(int)
    expires_at_ms: int = _is(int)
    """Milliseconds since 1970, UTC."""

    def to_params(self) -> dict[str, Any]:
        """As JSON values, with its ticket."""
        return {**attrs.asdict(self), "ticket": self._ticket()}

    def _ticket(self) -> str:
        return hmac.new(_KEY, encode(attrs.astuple(self)), hashlib.sha256).hexdigest()

    @classmethod
    def from_params(cls, given: Any) -> Reference:
        """The reference, if its ticket was made here and it has not expired.

        Raises:
            StaleError: it is invalid or has expired.
        """
        names = {*attrs.fields_dict(cls), "ticket"}
        if not isinstance(given, dict) or set(given) != names or type(given["ticket"]) is not str:
            raise StaleError(Reason.REFUSED, "this is not a reference")
        found = cls(**{name: given[name] for name in names - {"ticket"}})
        try:
            is_ours = hmac.compare_digest(found._ticket().encode(), given["ticket"].encode())
        except (UnicodeEncodeError, UnsupportedError):  # a lone surrogate cannot be encoded
            is_ours = False
        if not is_ours:
            raise StaleError(
                Reason.REFUSED, "its ticket was not made here, or was made for another reference"
            )
        if found.expires_at_ms <= time.time() * 1000:
            raise StaleError(Reason.EXPIRED, "it has expired")
        return found
