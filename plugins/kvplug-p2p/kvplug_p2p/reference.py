"""The reference to a finished prompt's blocks that travels through clients and proxies to a decode engine.

It is the ``kv_transfer_params`` of vLLM's NIXL connector, whose field names proxies know, plus the key
``kvplug``. A client may change or invent all of it, so the producer signs every field that it writes. Only
the producer verifies the signature, with a key that never leaves the engine.
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
"""The key of the fields that vLLM's NIXL connector does not have."""
MAX_BYTES: Final = 4 << 20
"""Limit for one reference as JSON. A million tokens in blocks of 16 take half a megabyte."""
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
    """Names a prompt's blocks, their producer, their contents, and how long they are kept."""

    engine_id: str
    epoch: str
    """One start of the producer's scheduler side."""
    request_id: str
    generation: int
    """Generation of the request. It grows when the request is computed again."""
    lease: int
    """Number of the lease. It grows with each hand-off of the engine."""
    expires_ms: int
    """Milliseconds since 1970 by the producer's clock."""
    address: str
    """Where the producer's worker 0 listens."""
    tensor_parallel_size: int
    block_size: int
    """Tokens in a block of the producer."""
    num_tokens: int
    """Tokens whose KV is in the blocks."""
    digest: str
    """Hash of ``extra`` and these tokens; see :func:`digest_of`."""
    block_ids: BlockIds

    def to_params(self, key: bytes) -> dict[str, Any]:
        """Return the ``kv_transfer_params``, with a ticket signed with ``key``."""
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
        """Read the reference in ``kv_transfer_params``, without verifying its ticket.

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
    """Encode the producer's fields and the ticket as JSON: the same text at both ends.

    Keys that others have added are left out.

    Raises:
        MalformedError: the params are not JSON, or too large.
    """
    try:
        text = json.dumps(_signed(params, ticket=True), sort_keys=True, separators=(",", ":")).encode("ascii")
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise MalformedError(f"not JSON: {e}") from e
    if len(text) > MAX_BYTES:
        raise MalformedError(f"{len(text)} bytes; {MAX_BYTES} at most")
    return text


def verified(text: bytes, key: bytes) -> Reference | None:
    """Read the reference in a text of :func:`to_text`; ``None`` if its ticket does not match ``key``."""
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
