"""The pages of a store at one moment, although they change while they are copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from kvplug.transport import PageEvent
from kvplug_host.pages.index import seconds_left


class Snapshot:
    """Collects what a store holds and expects, for a new listener.

    The store copies its pages some at a time and changes in between, so the copies are of different moments.
    The events since the first copy was made correct that: each states what became of its pages. A page that
    no event names was the same at all moments.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[bytes, dict[bytes, None]] = defaultdict(dict)
        """Keys by series."""
        self._declared: dict[bytes, tuple[bytes, float]] = {}
        """Series, and until when."""
        self._log: PageEvent.Log | None = None

    def add_held(self, pages: Iterable[tuple[bytes, bytes]]) -> None:
        """Key and series of pages that were held when they were copied."""
        for key, series in pages:
            self._held[series][key] = None

    def add_declared(self, pages: Iterable[tuple[bytes, bytes, float]]) -> None:
        """Key and series of pages that were declared when they were copied, and until when."""
        self._declared.update((key, (series, until)) for key, series, until in pages)

    def end(self, log: PageEvent.Log) -> None:
        """All was copied. ``log``: at the moment that the snapshot describes."""
        self._log = log

    def events(self, since: Iterable[PageEvent]) -> list[PageEvent]:
        """The events of the snapshot. ``since``: all events from the first copy to the end."""
        assert self._log is not None
        for event in since:
            self._apply(event)
        now = self._clock()
        held = {series: [*keys] for series, keys in self._held.items()}
        declared: dict[tuple[bytes, float], list[bytes]] = defaultdict(list)
        for key, declaration in self._declared.items():
            declared[declaration].append(key)
        return self._log.snapshot(
            held, [(series, keys, seconds_left(until - now)) for (series, until), keys in declared.items()]
        )

    def _apply(self, event: PageEvent) -> None:
        match event.kind:
            case "stored":
                self.add_held((key, event.series) for key in event.keys)
            case "removed":
                for key in event.keys:
                    self._held[event.series].pop(key, None)
            case "cleared":
                self._held.clear()
                self._declared.clear()
        expires = self._clock() + event.for_s
        for key in event.keys:
            _, until = self._declared.pop(key, (b"", 0.0))
            if event.kind == "declared":
                self._declared[key] = event.series, max(until, expires)
