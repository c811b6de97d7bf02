"""An index of the pages that one store holds for one worker, by chain, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvplug.transport import PageEvent, Presence, Series


class PageIndex:
    """The chains of pages in one series that are held, or coming.

    Not thread-safe: its owner locks it.
    """

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        """Chains of pages that are held."""
        self._coming: dict[bytes, float] = {}
        """Chains of pages that are coming, and until when requests wait for them."""
        self.is_cleared = False
        """The latest event was that the store was cleared."""

    def __len__(self) -> int:
        """Number of pages that are held or coming."""
        return len(self.held) + len(self._coming)

    def apply(self, event: PageEvent, series: Series) -> None:
        """Apply an event of the store. Pages of other series are ignored."""
        self.is_cleared = event.kind == "cleared"
        if event.kind in ("snapshot", "cleared"):
            self.held.clear()
            self._coming.clear()
        elif event.kind in ("stored", "declared", "removed") and event.series == series.id:
            chains = series.keys_of(event.keys)  # masking twice returns the chains
            if event.kind == "declared":
                self.expect(chains, event.for_s)
                return
            change = self.held.update if event.kind == "stored" else self.held.difference_update
            change(chains)
            self.settle(chains)

    def expect(self, chains: Iterable[bytes], for_s: float) -> None:
        """Note that these pages are coming, unless they are held. Requests wait at most ``for_s`` seconds."""
        until = time.monotonic() + for_s
        for chain in chains:
            if chain not in self.held:
                self._coming[chain] = until

    def settle(self, chains: Iterable[bytes]) -> None:
        """Stop waiting for these pages."""
        for chain in chains:
            self._coming.pop(chain, None)

    @property
    def is_expecting(self) -> bool:
        """Whether pages are coming."""
        now = time.monotonic()
        self._coming = {chain: until for chain, until in self._coming.items() if until > now}
        return bool(self._coming)

    def presence(self, chain: bytes) -> Presence:
        """The presence of one page."""
        if chain in self.held:
            return Presence.HELD
        until = self._coming.get(chain)
        if until is None:
            return Presence.ABSENT
        if time.monotonic() >= until:
            del self._coming[chain]
            return Presence.ABSENT
        return Presence.COMING
