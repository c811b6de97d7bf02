"""The storage of the connector "memory": a table for each producing engine, shared within this process.

It stores whole prompts, found by (extra, tokens) with a linear search. A full table evicts the oldest entry
that is not leased.

A reference to leased KV travels through a client's request as plain values, with a random number as its
ticket. It is valid as long as the table has a lease with exactly these values. A connector between processes
derives its tickets from the secret that both ends share.
"""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import CapacityError, PeerGoneError, TimeoutError
from kvplug.engine import ConnectorContext, EntryGoneError, Request
from kvplug.kit import Reason
from kvplug.transport import AddressInUseError

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[bytes, tuple[int, ...]]
"""``extra``, and the tokens of a prompt in whole blocks."""

_tables: Final[dict[str, EntryTable]] = {}


@attrs.frozen(eq=False, kw_only=True)
class PromptEntry:
    """One prompt's KV."""

    key: Key
    layers: tuple[tuple[Tensor, Tensor | None], ...]
    """Keys and values of each layer: [tokens, heads, head size]. Latent attention has no values."""
    digests: tuple[bytes, ...] = ()
    """A digest of each layer; empty if ``integrity`` is off."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer if part is not None)


@attrs.define(eq=False)
class PromptLease:
    """KV that is not evicted until the reference to it expires."""

    key: Key
    reference: dict[str, Any]
    is_stored: bool = False
    """The request's KV has been copied out of its blocks."""

    @property
    def has_expired(self) -> bool:
        return bool(self.reference["expires_at_ms"] <= time.time() * 1000)


class EntryTable:
    """The entries that one engine has stored, and their leases."""

    def __init__(self, contact: str, *, engine_id: str, kv_format: Hashable, max_bytes: int) -> None:
        """``kv_format``: must be equal at an engine that loads from this table.

        Raises:
            AddressInUseError: another engine of this process has this contact.
        """
        if _tables.setdefault(contact, self) is not self:
            raise AddressInUseError(f"another engine of this process keeps its KV at {contact}")
        self.contact, self.kv_format = contact, kv_format
        self.owner = {"engine_id": engine_id, "epoch": uuid.uuid4().hex, "contact": contact}
        """The part of a reference that is the same in all of this engine's start."""
        self.era = 0
        """Grows with each reset: KV computed in an earlier era is no longer stored."""
        self.fault: Callable[[PromptEntry], PromptEntry | None] | None = None
        """For tests: called with each entry that is read; may replace it or raise."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[Key, PromptEntry] = {}  # oldest first
        self._leases: dict[str, PromptLease] = {}  # by ticket

    @staticmethod
    def at(contact: str) -> EntryTable:
        """The table with this contact.

        Raises:
            PeerGoneError: there is none, or it is closed.
        """
        table = _tables.get(contact)
        if table is None:
            raise PeerGoneError(f"no engine of this process keeps KV at {contact}")
        return table

    def close(self) -> None:
        if _tables.get(self.contact) is self:
            del _tables[self.contact]
        self.clear()

    # -- entries -------------------------------------------------------------------------------

    def put(self, entry: PromptEntry, era: int) -> None:
        """Store an entry, replacing the one with the same key.

        Raises:
            EntryGoneError: it was computed before the last reset.
            CapacityError: it is larger than the table.
            TimeoutError: there is no room, since the other entries are leased.
        """
        if entry.nbytes > self._max_bytes:
            raise CapacityError(f"{entry.nbytes} bytes do not fit into {self._max_bytes}")
        with self._lock:
            if era != self.era:
                raise EntryGoneError("everything computed before was forgotten meanwhile")
            kept = {leased.key for leased in self._leases.values() if not leased.has_expired}
            others = {key: each for key, each in self._entries.items() if key != entry.key}
            room = self._max_bytes - entry.nbytes - sum(each.nbytes for each in others.values())
            for key in [key for key in others if key not in kept]:
                if room >= 0:
                    break
                room += others.pop(key).nbytes
            if room < 0:
                raise TimeoutError("everything on the table is leased")
            self._entries = {**others, entry.key: entry}

    def match(self, extra: bytes, tokens: tuple[int, ...]) -> int:
        """The number of leading tokens that the table holds."""
        with self._lock:
            return max((num_shared(key, extra, tokens) for key in self._entries), default=0)

    def find(self, extra: bytes, tokens: tuple[int, ...]) -> PromptEntry | None:
        """An entry that begins with all of these tokens. ``None``: a fault holds it up.

        Raises:
            EntryGoneError: there is none.
        """
        with self._lock:
            for key, entry in self._entries.items():
                if num_shared(key, extra, tokens) == len(tokens):
                    return entry if self.fault is None else self.fault(entry)
        raise EntryGoneError(f"{len(tokens)} tokens that were promised are not here any more")

    def clear(self) -> None:
        """Forget all KV computed until now."""
        with self._lock:
            self.era += 1
            self._entries.clear()
            self._leases.clear()

    # -- references ----------------------------------------------------------------------------

    def lease(self, key: Key, request: Request, duration_s: float) -> dict[str, Any]:
        """A reference to the entry that will be stored under this key. It is not evicted for
        ``duration_s``. An earlier lease of the same request ends.
        """
        ticket, name = secrets.token_hex(16), request.request_id
        reference = {
            **self.owner,
            "request_id": name,
            "generation": request.generation,
            "num_tokens": len(key[1]),
            "expires_at_ms": int((time.time() + duration_s) * 1000),
            "ticket": ticket,
        }
        with self._lock:
            others = self._leases.items()
            self._leases = {n: each for n, each in others if each.reference["request_id"] != name}
            self._leases[ticket] = PromptLease(key, reference)
        return reference

    def settle(self, ticket: str, *, is_stored: bool) -> None:
        """Record that the leased entry is stored, or never will be."""
        with self._lock:
            if not is_stored:
                self._leases.pop(ticket, None)
            elif ticket in self._leases:
                self._leases[ticket].is_stored = True

    def resolve(self, reference: Any, extra: bytes, tokens: tuple[int, ...]) -> int | Reason | None:
        """The number of a prompt's leading tokens that it refers to; ``None`` while they are still being
        stored; a reason if no lease has exactly this reference, or it has expired.
        """
        with self._lock:
            leased = self._lease_of(reference)
            if leased is None:
                return Reason.GONE
            if leased.has_expired:
                return Reason.EXPIRED
            return num_shared(leased.key, extra, tokens) if leased.is_stored else None

    def _lease_of(self, reference: Any) -> PromptLease | None:
        for leased in self._leases.values():
            if reference == leased.reference:  # 1 and 1.0 are equal
                same = all(type(reference[name]) is type(value) for name, value in leased.reference.items())
                return leased if same else None
        return None


def num_shared(key: Key, extra: bytes, tokens: tuple[int, ...]) -> int:
    """The number of leading tokens that a prompt shares with an entry."""
    if key[0] != extra:
        return 0
    pairs = enumerate(zip(tokens, key[1], strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(key[1])))


def kv_format_of(context: ConnectorContext) -> tuple[Any, ...]:
    """The properties that must be equal at two engines for one to load the other's KV."""
    layout, model = context.cache.groups[0].layout, attrs.evolve(context.model, name="")
    inside = (layout.axes, layout.block_format, layout.block_size) if layout.block_format else ()
    return model, layout.num_kv_heads, layout.head_size, layout.has_values, inside
