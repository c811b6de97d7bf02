"""The storage of the connector "memory": a table for each producing engine, shared within this process.

It stores whole prompts, found by (extra, tokens) with a linear search. A full table evicts the oldest entry
that is not leased.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import CapacityError, PeerGoneError, TimeoutError
from kvplug.engine import ConnectorContext, EntryGoneError
from kvplug.kit import Reason
from kvplug.transport import AddressInUseError
from kvplug_testing.memory.reference import Reference, StaleError

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


@attrs.define(eq=False, kw_only=True)
class PromptLease:
    """The KV that a reference refers to."""

    key: Key
    request_id: str
    generation: int
    expires_at: float
    """On the clock of ``time.time``, as in tickets."""
    is_stored: bool = False
    """The request's KV has been copied out of its blocks."""


class EntryTable:
    """The entries that one engine has stored, and their leases."""

    def __init__(self, contact: str, *, engine_id: str, kv_format: Hashable, max_bytes: int) -> None:
        """``kv_format``: must be equal at an engine that loads from this table.

        Raises:
            AddressInUseError: another engine of this process has this contact.
        """
        if _tables.setdefault(contact, self) is not self:
            raise AddressInUseError(f"another engine of this process keeps its KV at {contact}")
        self.contact, self.engine_id, self.kv_format = contact, engine_id, kv_format
        self.epoch = uuid.uuid4().hex
        self.era = 0
        """Grows with each reset: KV computed in an earlier era is no longer stored."""
        self.fault: Callable[[PromptEntry], PromptEntry | None] | None = None
        """For tests: called with each entry that is read; may replace it or raise."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[Key, PromptEntry] = {}  # oldest first
        self._leases: dict[int, PromptLease] = {}
        self._numbers = itertools.count(1)

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
            kept = {leased.key for leased in self._leases.values() if leased.expires_at > time.time()}
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
            prefixes = (_common(tokens, held) for key_extra, held in self._entries if key_extra == extra)
            return max(prefixes, default=0)

    def find(self, extra: bytes, tokens: tuple[int, ...]) -> PromptEntry | None:
        """An entry that begins with all of these tokens. ``None``: a fault holds it up.

        Raises:
            EntryGoneError: there is none.
        """
        with self._lock:
            for (key_extra, held), entry in self._entries.items():
                if key_extra == extra and held[: len(tokens)] == tokens:
                    return entry if self.fault is None else self.fault(entry)
        raise EntryGoneError(f"{len(tokens)} tokens that were promised are not here any more")

    def clear(self) -> None:
        """Forget all KV computed until now."""
        with self._lock:
            self.era += 1
            self._entries.clear()
            self._leases.clear()

    # -- references ----------------------------------------------------------------------------

    def lease(self, key: Key, *, request_id: str, generation: int, duration_s: float) -> Reference:
        """A reference to the entry that will be stored under this key. It is not evicted for
        ``duration_s``. An earlier lease of the same request ends.
        """
        expires_at_ms = int((time.time() + duration_s) * 1000)
        leased = PromptLease(
            key=key, request_id=request_id, generation=generation, expires_at=expires_at_ms / 1000
        )
        with self._lock:
            lease = next(self._numbers)
            others = {n: each for n, each in self._leases.items() if each.request_id != request_id}
            self._leases = {**others, lease: leased}
        return Reference(
            engine_id=self.engine_id,
            epoch=self.epoch,
            contact=self.contact,
            request_id=request_id,
            generation=generation,
            lease=lease,
            num_tokens=len(key[1]),
            expires_at_ms=expires_at_ms,
        )

    def settle(self, lease: int, *, is_stored: bool) -> None:
        """Record that the leased entry is stored, or never will be."""
        with self._lock:
            if not is_stored:
                self._leases.pop(lease, None)
            elif lease in self._leases:
                self._leases[lease].is_stored = True

    def resolve(self, reference: Reference, extra: bytes, tokens: tuple[int, ...]) -> int | None:
        """The number of a prompt's leading tokens that it refers to; ``None`` while they are still being
        stored.

        Raises:
            StaleError: it is from an earlier start of the engine, has no lease any more, or belongs to
                another prompt.
        """
        if (reference.engine_id, reference.epoch) != (self.engine_id, self.epoch):
            raise StaleError(Reason.GONE, "it is of another engine, or of an earlier start of this one")
        with self._lock:
            leased = self._leases.get(reference.lease)
            if leased is None or (leased.request_id, leased.generation) != (
                reference.request_id,
                reference.generation,
            ):
                raise StaleError(Reason.GONE, "what it refers to is leased no more")
            held = leased.key[1]
            if reference.num_tokens > len(held):
                raise StaleError(Reason.REFUSED, f"it says {reference.num_tokens} tokens of {len(held)}")
            common = _common(tokens, held[: reference.num_tokens]) if leased.key[0] == extra else 0
            return common if leased.is_stored else None


def _common(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        count += 1
    return count


def kv_format_of(context: ConnectorContext) -> tuple[Any, ...]:
    """The properties that must be equal at two engines for one to load the other's KV."""
    layout, model = context.cache.groups[0].layout, attrs.evolve(context.model, name="")
    inside = (layout.axes, layout.block_format, layout.block_size) if layout.block_format else ()
    return model, layout.num_kv_heads, layout.head_size, layout.has_values, inside
