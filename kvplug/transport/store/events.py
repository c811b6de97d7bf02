"""Events of a store about its pages, and followers that keep a complete index of its keys.

A store numbers its events 1, 2, 3, … A follower applies them in that order. If an event is missing, or the
store has restarted (its *epoch* changed), the follower is not *ready*: its index then answers "not yet",
since any other answer may be wrong.

A new follower begins with a snapshot. The *snapshot* event gives the number of the last event that it covers,
and how many *stored* and *declared* events belong to it. Those events follow, and then the live ones.

Pure: no thread, no lock, no I/O.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from kvplug.errors import WireError
from kvplug.net.wire import from_plain
from kvplug.transport.store.keys import KEY_BYTES

SERIES_BYTES: Final = 16
_SNAPSHOT_PAGES: Final = 4096
"""The most keys in one event of a snapshot."""


def _shown(keys: Sequence[bytes]) -> str:
    return f"<{len(keys)} keys>"


EventKind = Literal["snapshot", "stored", "declared", "removed", "cleared"]


@attrs.frozen(kw_only=True)
class PageEvent:
    """A change of the pages of a store. Its kind is one of:

    - ``snapshot``: empty the index; the next :attr:`count` events describe all that the store holds and
      expects as of :attr:`seq`
    - ``stored``: the store holds the pages from now on
    - ``declared``: the pages are going to be put. They are *stored* or *removed* within :attr:`for_s`
    - ``removed``: the store no longer holds the pages, or no longer expects them
    - ``cleared``: the store holds and expects no pages any more
    """

    class Removal(enum.StrEnum):
        """Why a store no longer holds or expects a page."""

        EVICTED = "evicted"
        """The page made room for another."""
        EXPIRED = "expired"
        """The page reached its maximum age, or was declared and not put in time."""
        WITHDRAWN = "withdrawn"
        """The page was declared, and its writer gave it up."""
        REMOVED = "removed"
        """A program removed the page."""
        CORRUPT = "corrupt"
        """The page's bytes were found to be wrong."""
        OTHER = "other"
        """A reason that this version does not know."""

    class Log:
        """Numbers a store's events.

        The store calls the log under its own lock, and passes events to its followers in the order of their
        numbers. The log does not record which pages the store holds.

        >>> log = PageEvent.Log("life 1")
        >>> event = log.stored(bytes(16), [bytes(32)])
        >>> log.position
        ('life 1', 1)

        Args:
            epoch: identifies this run of the store; random by default.
        """

        def __init__(self, epoch: str | None = None) -> None:
            self.epoch = uuid.uuid4().hex if epoch is None else epoch
            """Identifies this run of the store in every event."""
            self._seq = 0

        @property
        def position(self) -> tuple[str, int]:
            """(epoch, number of the latest event); the number is 0 before the first."""
            return self.epoch, self._seq

        def _event(self, kind: EventKind, **fields: Any) -> PageEvent:
            self._seq += 1
            return PageEvent(kind=kind, epoch=self.epoch, seq=self._seq, **fields)

        def stored(self, series: bytes, keys: Sequence[bytes]) -> PageEvent:
            """Return the next event, for pages that the store holds from now on."""
            return self._event("stored", series=series, keys=tuple(keys))

        def declared(self, series: bytes, keys: Sequence[bytes], for_s: float) -> PageEvent:
            """Return the next event, for pages that are going to be put within ``for_s`` seconds."""
            return self._event("declared", series=series, keys=tuple(keys), for_s=for_s)

        def removed(self, series: bytes, keys: Sequence[bytes], reason: PageEvent.Removal) -> PageEvent:
            """Return the next event, for pages that the store no longer holds or expects."""
            return self._event("removed", series=series, keys=tuple(keys), reason=reason)

        def cleared(self) -> PageEvent:
            """Return the next event, for a store that forgets everything."""
            return self._event("cleared")

        def snapshot(
            self,
            held: Mapping[bytes, Sequence[bytes]],
            declared: Sequence[tuple[bytes, Sequence[bytes], float]] = (),
        ) -> list[PageEvent]:
            """Return the first events for a new follower.

            Args:
                held: for each series, the keys of all held pages.
                declared: series, keys and remaining seconds of all pages that were declared and not yet put.
            """
            of_pages = [
                PageEvent(kind="stored", epoch=self.epoch, seq=self._seq, series=series, keys=part)
                for series, keys in held.items()
                for part in _parts(keys)
            ]
            of_pages += [
                PageEvent(
                    kind="declared", epoch=self.epoch, seq=self._seq, series=series, keys=part, for_s=for_s
                )
                for series, keys, for_s in declared
                for part in _parts(keys)
            ]
            return [
                PageEvent(kind="snapshot", epoch=self.epoch, seq=self._seq, count=len(of_pages)),
                *of_pages,
            ]

    class Follower:
        """Checks that each event is the next one, and knows whether the index is complete.

        >>> log, follower = PageEvent.Log(), PageEvent.Follower()
        >>> all(map(follower.accept, log.snapshot({}))), follower.ready
        (True, True)
        >>> missed, event = log.stored(bytes(16), [bytes(32)]), log.cleared()
        >>> follower.accept(event), follower.ready
        (False, False)
        """

        def __init__(self) -> None:
            self._epoch: str | None = None
            self._seq = 0
            self._left = 0
            """Number of events of the snapshot that have not arrived yet."""

        @property
        def ready(self) -> bool:
            """Whether the index equals the store as of the last accepted event, and no event is missing."""
            return self._epoch is not None and not self._left

        @property
        def epoch(self) -> str | None:
            """The store's epoch, or ``None`` if a snapshot is needed."""
            return self._epoch

        def accept(self, event: PageEvent) -> bool:
            """Return whether ``event`` is the next one, which the index must apply now.

            False means that an earlier event is missing, or that the store has restarted. The follower is
            then not ready until it has accepted the next snapshot.
            """
            if event.kind == "snapshot":
                self._epoch, self._seq, self._left = event.epoch, event.seq, event.count
                return True
            if event.epoch != self._epoch:
                self._epoch = None
            elif self._left:
                if event.kind in ("stored", "declared") and event.seq == self._seq:
                    self._left -= 1
                    return True
                self._epoch = None
            elif event.seq == self._seq + 1:
                self._seq = event.seq
                return True
            else:
                self._epoch = None
            return False

    kind: EventKind
    """What happened."""
    epoch: str
    """The store's epoch, which changes when the store restarts."""
    seq: int
    """The event's number in its epoch, one more than the previous event's."""
    series: bytes = b""
    """Id of the series that all these pages belong to."""
    keys: tuple[bytes, ...] = attrs.field(default=(), repr=_shown)
    """Keys of the pages, 32 bytes each."""
    for_s: float = 0.0
    """For ``declared``: within how many seconds the pages are expected."""
    reason: PageEvent.Removal = Removal.OTHER
    """For ``removed``: why the pages are gone."""
    count: int = 0
    """For ``snapshot``: how many of the following events belong to it."""

    def to_plain(self) -> dict[str, Any]:
        """Return a dict for a channel: the kind, as ``event``, and the fields of events of this kind."""
        plain = {"event": self.kind, **{name: getattr(self, name) for name in _FIELDS[self.kind]}}
        if "keys" in plain:
            plain["keys"] = b"".join(self.keys)
        if "reason" in plain:
            plain["reason"] = self.reason.value
        return plain

    @staticmethod
    def from_plain(plain: Any) -> PageEvent:
        """Return the event that :meth:`to_plain` described. Ignores fields of a newer version.

        Raises:
            WireError: a field of the event is missing or wrong; the message names it.
        """
        kind = plain.get("event") if isinstance(plain, Mapping) else None
        names = _FIELDS.get(kind) if isinstance(kind, str) else None
        if names is None:
            raise WireError(f"no store event is called {kind!r:.40}")
        if missing := [name for name in names if name not in plain]:
            raise WireError(f"store event: {', '.join(missing)} is missing")
        fields = {"kind": kind, **{name: plain[name] for name in names}}
        if "keys" in fields:
            series, joined = fields["series"], fields["keys"]
            if type(series) is not bytes or type(joined) is not bytes:
                raise WireError("store event: series and keys must be bytes")
            if len(series) != SERIES_BYTES or len(joined) % KEY_BYTES:
                raise WireError(f"store event: a series of {len(series)} bytes, keys of {len(joined)} bytes")
            fields["keys"] = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
        if type(reason := fields.get("reason")) is str and reason not in _REASONS:
            fields["reason"] = PageEvent.Removal.OTHER
        event = from_plain(fields, PageEvent, "store event")
        numbers = event.seq, event.count, event.for_s
        if not all(0 <= number < 1 << 63 for number in numbers):
            raise WireError(f"store event: a number is out of bounds: {numbers}")
        return event


_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "snapshot": ("epoch", "seq", "count"),
    "stored": ("epoch", "seq", "series", "keys"),
    "declared": ("epoch", "seq", "series", "keys", "for_s"),
    "removed": ("epoch", "seq", "series", "keys", "reason"),
    "cleared": ("epoch", "seq"),
}
_REASONS: Final = frozenset(PageEvent.Removal)


def _parts(keys: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    for begin in range(0, len(keys), _SNAPSHOT_PAGES):
        yield tuple(keys[begin : begin + _SNAPSHOT_PAGES])
