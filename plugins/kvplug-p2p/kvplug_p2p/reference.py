"""The reference to a finished prompt's blocks that travels through clients and proxies to a decode engine.

It is the ``kv_transfer_params`` of vLLM's NIXL connector, whose field names proxies know, and one key more,
``kvplug``. A client may change or invent all of it, so the producer signs everything that it has written; it
alone verifies that, with a key that never leaves the engine.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import attrs

from kvplug.engine import BlockIds
from kvplug.net.wire.token_ids import pack_tokens

OURS: Final = "kvplug"
"""The key under which stands what vLLM's NIXL connector has no field for."""
MAX_BYTES: Final = 4 << 20
"""Of one reference as JSON. A million tokens in blocks of 16 take half a megabyte."""
_KEY_BYTES: Final = 32


class MalformedError(ValueError):
    """These ``kv_transfer_params`` are not a reference of this connector."""


def digest_of(extra: bytes, token_ids: Sequence[int]) -> str:
    """A hash of what determines the KV of these tokens: 32 hex digits (BLAKE2b)."""
    state = hashlib.blake2b(len(extra).to_bytes(8, "little") + extra, digest_size=16, person=b"kvplug p2p")
    state.update(pack_tokens(token_ids))
    return state.hexdigest()


@attrs.frozen(kw_only=True)
class Reference:
    """Whose blocks they are, for how long, and what they hold."""

    engine_id: str
    epoch: str
    """Of the producer's scheduler side; changes with each start."""
    request_id: str
    generation: int
    """Of the request: grows when it is computed again."""
    lease: int
    """Number of the lease. Grows with each hand-off of an engine."""
    expires_ms: int
    """By the producer's clock, milliseconds since 1970."""
    address: str
    """Where the producer's worker 0 listens."""
    tensor_parallel_size: int
    block_size: int
    """Tokens in a block of the producer's."""
    num_tokens: int
    """Tokens whose KV is in the blocks."""
    digest: str
    """Of ``extra`` and these tokens; see :func:`digest_of`."""
    block_ids: BlockIds

    def to_params(self, key: bytes) -> dict[str, Any]:
        """The ``kv_transfer_params``, with a ticket made with ``key``."""
        host, _, port = self.address.rpartition("-" if self.address.startswith("unix:") else ":")
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": [list(table) for table in self.block_ids],
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": self.tensor_parallel_size,
            OURS: {
                "epoch": self.epoch,
                "generation": self.generation,
                "lease": self.lease,
                "expires_ms": self.expires_ms,
                "address": self.address,
                "block_size": self.block_size,
                "num_tokens": self.num_tokens,
                "digest": self.digest,
            },
        }
        params[OURS]["ticket"] = _ticket(key, params)
        return params

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """The reference in ``kv_transfer_params``. Its ticket is not verified.

        Raises:
            MalformedError: a field is missing, or has another type.
        """
        ours = params.get(OURS)
        if type(ours) is not dict:
            raise MalformedError(f"{OURS}: not a dict")
        tables = params.get("remote_block_ids")
        if type(tables) is not list or not all(
            type(table) is list and all(type(block) is int for block in table) for table in tables
        ):
            raise MalformedError("remote_block_ids: not lists of block ids")
        try:
            found = cls(
                engine_id=params["remote_engine_id"],
                request_id=params["remote_request_id"],
                tensor_parallel_size=params["tp_size"],
                block_ids=tuple(map(tuple, tables)),
                **{name: value for name, value in ours.items() if name != "ticket"},
            )
        except (KeyError, TypeError) as e:
            raise MalformedError(f"a field is missing or unknown: {e}") from e
        for field in attrs.fields(cls):
            value = getattr(found, field.name)
            is_right = {"int": type(value) is int and value >= 0, "str": type(value) is str}
            if not is_right.get(str(field.type), True):
                raise MalformedError(f"{field.name}: {value!r:.100}")
        return found


def to_text(params: Mapping[str, Any]) -> bytes:
    """What the producer has written into these params and their ticket, as JSON: the same text at both ends.

    Keys that others have added are left out.

    Raises:
        MalformedError: it is not JSON, or too large.
    """
    try:
        text = json.dumps(_signed(params, ticket=True), sort_keys=True, separators=(",", ":")).encode("ascii")
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise MalformedError(f"not JSON: {e}") from e
    if len(text) > MAX_BYTES:
        raise MalformedError(f"{len(text)} bytes; {MAX_BYTES} at most")
    return text


def verified(text: bytes, key: bytes) -> Reference | None:
    """The reference in what :func:`to_text` made; ``None``: it was not signed with ``key`` as it stands."""
    try:
        params = json.loads(text)
        given = params[OURS]["ticket"]
        if not hmac.compare_digest(_ticket(key, params), given):
            return None
        return Reference.from_params(params)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


_FIELDS: Final = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_engine_id",
    "remote_request_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
    "tp_size",
)


def _signed(params: Mapping[str, Any], *, ticket: bool) -> dict[str, Any]:
    ours = {name: value for name, value in params[OURS].items() if ticket or name != "ticket"}
    return {**{name: params[name] for name in _FIELDS}, OURS: ours}


def _ticket(key: bytes, params: Mapping[str, Any]) -> str:
    text = json.dumps(_signed(params, ticket=False), sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode("ascii"), "sha256").hexdigest()
