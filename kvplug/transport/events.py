"""Events of a store about its entries, and followers that keep a complete copy of its index.

A store numbers its events: 1, 2, 3, … A follower applies them in that order. If one is missing, or the store
has restarted (its *epoch* changed), the follower is not *ready*: queries of the copy then return "not yet"
instead of an answer that may be wrong.

A new follower begins with a :class:`Snapshot`: its header says up to which number it reaches and how many
:class:`Stored` events it has; they follow with their old numbers, ascending, with gaps where entries were
removed; then come the live events. A follower that was disconnected sends its position and receives the
events that it missed (:meth:`EventLog.since`), or a snapshot if the log no longer has them.

Pure: no thread, no lock, no I/O.
"""

from __future__ import annotations

import enum
import itertools
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvplug.errors import WireError
from kvplug.transport.token_ids import pack_tokens, unpack_tokens

_EMPTY: Mapping[str, Any] = {}
_MAX_ENTRY_ID = (1 << 63) - 1


class RemovalReason(enum.StrEnum):
    """Why an entry is no longer available."""

    TAKEN = "taken"
    """A consumer has taken it out (if that transfer fails, it is stored again, under a new number)."""
    EVICTED = "evicted"
    """It was evicted to make room for another."""
    EXPIRED = "expired"
    """It reached its maximum age."""
    CLEARED = "cleared"
    """The store was emptied."""
    OTHER = "other"
    """A reason this version does not know."""


@attrs.frozen(kw_only=True)
class Stored:
    """An entry is available from now on."""

    epoch: str
    """The store's epoch; changes when it restarts."""
    seq: int
    entry_id: int
    extra: bytes = b""
    packed_tokens: bytes = attrs.field(repr=lambda packed: f"<{len(packed) // 8} tokens>")
    """The token ids that count (those under the roi): int64, little-endian."""
    metadata: Mapping[str, Any] = _EMPTY
    """Plain values."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The token ids, without a copy where the machine is little-endian."""
        return unpack_tokens(self.packed_tokens)


@attrs.frozen(kw_only=True)
class Removed:
    """An entry is no longer available."""

    epoch: str
    seq: int
    entry_id: int
    reason: RemovalReason = attrs.field(converter=RemovalReason)


@attrs.frozen(kw_only=True)
class Snapshot:
    """Clear the copy: the next ``count`` events are all entries that the store holds as of ``seq``."""

    epoch: str
    seq: int
    count: int


StoreEvent = Snapshot | Stored | Removed


# -- the store's side --------------------------------------------------------------------------


class EventLog:
    """Numbers a store's events, and computes the events that a follower needs in order to be complete.

    The store calls it under its own lock, and hands every event to its followers in the same order.

    >>> log = EventLog("life 1")
    >>> event = log.stored(7, [1, 2, 3])
    >>> log.position
    ('life 1', 1)
    >>> log.since(("life 1", 0)) == [event]
    True

    Args:
        epoch: of this store's life; a new random one by default.
        history: how many events are kept for followers that come back.
    """

    def __init__(self, epoch: str | None = None, *, history: int = 1024) -> None:
        self.epoch = uuid.uuid4().hex if epoch is None else epoch
        self._seq = 0
        self._held: dict[int, Stored] = {}  # ascending seq, since a dict keeps the order of insertion
        self._recent: deque[Stored | Removed] = deque(maxlen=history)

    @property
    def position(self) -> tuple[str, int]:
        """(epoch, number of the latest event); the number is 0 before the first."""
        return self.epoch, self._seq

    def __len__(self) -> int:
        return len(self._held)

    def stored(
        self,
        entry_id: int,
        token_ids: Iterable[int],
        *,
        extra: bytes = b"",
        metadata: Mapping[str, Any] = _EMPTY,
    ) -> Stored:
        """The event of an entry that is available from now on.

        Raises:
            ValueError: it was available before.
        """
        if entry_id in self._held:
            raise ValueError(f"entry {entry_id} is held already")
        event = Stored(
            epoch=self.epoch,
            seq=self._seq + 1,
            entry_id=entry_id,
            extra=extra,
            packed_tokens=pack_tokens(token_ids),
            metadata=metadata,
        )
        self._seq += 1
        self._held[entry_id] = event
        self._recent.append(event)
        return event

    def removed(self, entry_id: int, reason: RemovalReason | str) -> Removed:
        """The event of an entry that is no longer available.

        Raises:
            KeyError: it was not available before.
        """
        event = Removed(epoch=self.epoch, seq=self._seq + 1, entry_id=entry_id, reason=RemovalReason(reason))
        del self._held[entry_id]
        self._seq += 1
        self._recent.append(event)
        return event

    def snapshot(self) -> list[StoreEvent]:
        """The first events for a new follower: the header, then every entry that the store holds."""
        header = Snapshot(epoch=self.epoch, seq=self._seq, count=len(self._held))
        return [header, *self._held.values()]

    def since(self, position: tuple[str, int] | None) -> list[StoreEvent]:
        """The events that a follower at ``position`` has missed; a snapshot if the log lacks some."""
        if position is None or position[0] != self.epoch or position[1] > self._seq:
            return self.snapshot()
        missed = self._seq - position[1]
        if missed > len(self._recent):
            return self.snapshot()
        return list(itertools.islice(self._recent, len(self._recent) - missed, None))


# -- the follower's side -----------------------------------------------------------------------


class Follower:
    """Checks that each event is the next one, and whether the copy is complete.

    ::

        if follower.accept(event):
            match event:                        # apply it to the copy
                case Snapshot(): clear()
                case Stored(): insert(event.entry_id, event.token_ids, event.extra)
                case Removed(): remove(event.entry_id)
        else:
            ask_for(log.since(follower.position))

        answer = copy.match(…) if follower.ready else None    # None: not yet

    >>> log, follower = EventLog(), Follower()
    >>> all(map(follower.accept, log.snapshot())), follower.ready
    (True, True)
    >>> missed, event = log.stored(7, [1, 2]), log.stored(8, [3])
    >>> follower.accept(event), follower.ready
    (False, False)
    >>> all(map(follower.accept, log.since(follower.position))), follower.ready
    (True, True)
    """

    def __init__(self) -> None:
        self._epoch: str | None = None
        self._seq = 0
        self._target = 0
        """The highest number known to exist: ready only once everything up to it was applied."""
        self._snapshot_seq = 0
        self._left = 0
        """Stored events the snapshot still owes."""

    @property
    def ready(self) -> bool:
        """Whether the copy equals the store as of the latest event that is known to exist."""
        return self._epoch is not None and not self._left and self._seq >= self._target

    @property
    def position(self) -> tuple[str, int] | None:
        """The last event up to which the copy is complete; ``None``: a snapshot is needed."""
        return None if self._epoch is None or self._left else (self._epoch, self._seq)

    def accept(self, event: StoreEvent) -> bool:
        """Whether ``event`` is the next one, to be applied now.

        False: it is not; something before it is missing, or the store has restarted, and the follower
        is not ready until the missing events, or a snapshot, have been accepted. An event that was
        accepted before is not the next one either, and changes nothing.
        """
        if isinstance(event, Snapshot):
            # a snapshot older than a known event does not make the copy ready
            self._target = max(self._target, event.seq) if event.epoch == self._epoch else event.seq
            self._epoch, self._left, self._snapshot_seq = event.epoch, event.count, event.seq
            self._seq = 0 if event.count else event.seq
            return True
        if self._epoch is None:
            return False
        if event.epoch != self._epoch:
            self._lose()
            return False
        if self._left:
            return self._accept_of_snapshot(event)
        if event.seq == self._seq + 1:
            self._seq = event.seq
            self._target = max(self._target, event.seq)
            return True
        self._target = max(self._target, event.seq)
        return False

    def _accept_of_snapshot(self, event: Stored | Removed) -> bool:
        if not isinstance(event, Stored) or not self._seq < event.seq <= self._snapshot_seq:
            self._lose()
            return False
        self._left -= 1
        self._seq = event.seq if self._left else self._snapshot_seq
        return True

    def _lose(self) -> None:
        self._epoch = None


# -- plain form --------------------------------------------------------------------------------


def event_to_plain(event: StoreEvent) -> dict[str, Any]:
    """For a channel: a dict with ``event`` one of "snapshot", "stored", "removed"."""
    common = {"epoch": event.epoch, "seq": event.seq}
    match event:
        case Snapshot():
            return {"event": "snapshot", **common, "count": event.count}
        case Stored():
            return {
                "event": "stored",
                **common,
                "entry_id": event.entry_id,
                "extra": event.extra,
                "tokens": event.packed_tokens,
                "metadata": dict(event.metadata),
            }
        case Removed():
            return {"event": "removed", **common, "entry_id": event.entry_id, "reason": str(event.reason)}


def event_from_plain(plain: Any) -> StoreEvent:
    """The event that :func:`event_to_plain` described. Keys of a newer version are passed over.

    Raises:
        WireError: it is none.
    """
    kind = _field(plain, "event", str)
    epoch, seq = _field(plain, "epoch", str), _count(plain, "seq")
    if kind == "snapshot":
        return Snapshot(epoch=epoch, seq=seq, count=_count(plain, "count"))
    entry_id = _count(plain, "entry_id")
    if entry_id >= _MAX_ENTRY_ID:
        raise WireError("no store event: 'entry_id' is no number of 63 bits")
    if kind == "stored":
        packed = _field(plain, "tokens", bytes)
        unpack_tokens(packed)
        return Stored(
            epoch=epoch,
            seq=seq,
            entry_id=entry_id,
            extra=_field(plain, "extra", bytes),
            packed_tokens=packed,
            metadata=_field(plain, "metadata", dict),
        )
    if kind == "removed":
        reason = _field(plain, "reason", str)
        known = reason if reason in frozenset(RemovalReason) else RemovalReason.OTHER
        return Removed(epoch=epoch, seq=seq, entry_id=entry_id, reason=known)
    raise WireError(f"no store event is called {kind!r:.40}")


def _field(plain: Any, name: str, kind: type) -> Any:
    found = plain.get(name) if isinstance(plain, Mapping) else None
    if type(found) is not kind:
        raise WireError(f"no store event: {name!r} is {type(found).__name__}, not {kind.__name__}")
    return found


def _count(plain: Any, name: str) -> int:
    found: int = _field(plain, name, int)
    if found < 0:
        raise WireError(f"no store event: {name!r} is negative")
    return found
