"""Which pages of a request every worker can load, and from which sources."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import attrs

from kvplug.engine import TransferStats
from kvplug.transport import Presence
from kvplug_lookup.connector.sources import Inquiry, Source

_HAS_WAITED: Final = -1.0
_UNREADABLE_S: Final = 30.0
"""For so long a page is not promised from a source in which a worker could not read it."""

Runs = tuple[tuple[str, int], ...]
"""From which source, and so many pages, one after the other."""


@attrs.define(eq=False)
class Search:
    """The search for the pages of one request."""

    inquiries: list[tuple[str, Inquiry]]
    """The name of each source, and its inquiry, in their order."""
    waits_until: float = 0.0
    """When the request is computed instead of waiting for pages that are coming; 0: it does not wait yet;
    ``_HAS_WAITED``: it has waited, and does not again, however often it is asked about."""
    is_counted: bool = False
    """Whether the pages that no source holds were counted, and the sources know what was promised: the engine
    may ask again."""


class Matcher:
    """Searches in sources, in their order: the engine's own stores are the first of them.

    Args:
        sources: may change; those of a search are those at its begin.
        num_workers: which all have to load the pages.
        wait_timeout_s: how long a request waits for pages that are coming, and for answers of sources.
        stats: counts requests that have waited for so long, and pages that sources do not hold.
    """

    def __init__(
        self, sources: Sequence[Source], num_workers: int, wait_timeout_s: float, stats: TransferStats
    ) -> None:
        self._sources = sources
        self._num_workers = num_workers
        self._wait_timeout_s = wait_timeout_s
        self._stats = stats
        self.num_stores = 0
        """So many of the sources are the engine's own stores."""
        self._unreadable: dict[tuple[str, bytes], float] = {}
        """Sources and chains of pages that workers could not read, and until when they are not promised."""

    def begin(self) -> Search:
        """A new request has come in."""
        return Search([(source.name, source.inquire()) for source in self._sources])

    def held(self, search: Search, chains: list[bytes], first: int) -> tuple[int, tuple[Runs, ...]] | None:
        """How many pages from number ``first`` on every worker can load, and from where, for each of them.

        ``None``: it is not known yet.
        """
        count, sources = len(chains) - first, []
        for rank in range(self._num_workers):
            found = self._held_by(search, chains, first, rank)
            if found is None:
                return None
            held, runs = found
            count = min(count, held)
            sources.append(runs)
        if search.waits_until != _HAS_WAITED:
            search.waits_until = 0.0
        num_missing = len(chains) - first - count
        if num_missing and not search.is_counted:
            for name, _ in search.inquiries:
                self._stats.not_held(name, count=num_missing)
        if not search.is_counted:
            for rank, runs in enumerate(sources):
                self._promise(chains, first, count, rank, runs)
        search.is_counted = True
        return count, tuple(first_of(runs, count) for runs in sources)

    def note_unreadable(self, pages: Sequence[tuple[str, bytes]]) -> None:
        """A worker could not read these pages, each named by its source and its chain."""
        if pages:
            now = time.monotonic()
            self._unreadable = {page: until for page, until in self._unreadable.items() if until > now}
            self._unreadable |= dict.fromkeys(pages, now + _UNREADABLE_S)

    def _readable(self, name: str, presences: list[Presence], chains: list[bytes]) -> list[Presence]:
        """What a source has of these pages, up to the first that a worker could not read."""
        now = time.monotonic() if self._unreadable else 0.0
        for at, (chain, presence) in enumerate(zip(chains, presences, strict=False) if now else ()):
            if presence is Presence.HELD and self._unreadable.get((name, chain), 0.0) > now:
                return presences[:at]
        return presences

    def _promise(self, chains: list[bytes], at: int, count: int, rank: int, runs: Runs) -> None:
        """Tell peer engines which of their pages worker ``rank`` is going to load."""
        peers = {source.name: source for source in self._sources[self.num_stores :]}
        for name, length in first_of(runs, count):
            if name in peers:
                peers[name].promise(chains[at : at + length], rank)
            at += length

    def _held_by(self, search: Search, chains: list[bytes], first: int, rank: int) -> tuple[int, Runs] | None:
        """The same for worker ``rank``. A source is asked only for what those before it do not have."""
        runs: list[tuple[str, int]] = []
        answers: dict[int, list[Presence]] = {}
        begun: dict[int, int] = {}
        at = first
        while at < len(chains):
            must_wait, taken = False, 0
            for number, (name, inquiry) in enumerate(search.inquiries):
                if number not in answers or at < begun[number] or at - begun[number] >= len(answers[number]):
                    known = inquiry.presences(chains, at, rank)
                    if known is None:
                        must_wait = True
                        if number < self.num_stores and self._may_wait(search):
                            return None  # its own stores are nearer than those after them
                        continue
                    answers[number], begun[number] = self._readable(name, known, chains[at:]), at
                have = answers[number][at - begun[number] :]
                taken = _num_held(have)
                if taken:
                    runs.append((name, taken))
                    break
                must_wait = must_wait or bool(have)
            if taken:
                at += taken
            elif must_wait and self._may_wait(search):
                return None
            else:
                break
        return at - first, tuple(runs)

    def _may_wait(self, search: Search) -> bool:
        """Whether the request waits a little longer for pages that are coming, or for a source's answer."""
        now = time.monotonic()
        if not search.waits_until:
            search.waits_until = now + self._wait_timeout_s
        if now < search.waits_until:
            return True
        if search.waits_until != _HAS_WAITED:
            self._stats.fail("match", "expired")
            search.waits_until = _HAS_WAITED
        return False


def _num_held(presences: list[Presence]) -> int:
    """How many pages are held, up to the first that is not."""
    if presences.count(Presence.HELD) == len(presences):  # fast, and the usual case
        return len(presences)
    return next(at for at, each in enumerate(presences) if each is not Presence.HELD)


def first_of(runs: Runs, count: int) -> Runs:
    """The first ``count`` pages of these runs."""
    found, left = [], count
    for name, length in runs:
        if left <= 0:
            break
        found.append((name, min(length, left)))
        left -= length
    return tuple(found)


def tokens_of(runs: Runs, page_tokens: int, start: int, end: int) -> list[tuple[str, int]]:
    """How many of the tokens ``start`` to ``end`` are in each run; ``start`` lies in the first page."""
    found, at = [], start - start % page_tokens
    for name, count in runs:
        until = at + count * page_tokens
        if (num := min(end, until) - max(start, at)) > 0:
            found.append((name, num))
        at = until
    return found
