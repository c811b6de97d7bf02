"""Finds the pages of a request that every worker can load, and their sources."""

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
"""How long a page is not promised from a source after a worker could not read it there."""

Runs = tuple[tuple[str, int], ...]
"""Runs of pages in order: the source, and the number of pages."""


@attrs.define(eq=False)
class Search:
    """The search for the pages of one request."""

    inquiries: list[tuple[str, Inquiry]]
    """The name of each source, and its inquiry, in order."""
    waits_until: float = 0.0
    """Until when the request waits for pages that are coming, before it is computed; 0: it does not wait yet;
    ``_HAS_WAITED``: it has waited, and does not wait again, however often the engine asks."""
    is_counted: bool = False
    """Whether missing pages were counted, and sources were sent the promises. The engine may ask again."""

    @property
    def has_expired(self) -> bool:
        """Whether the request has waited in vain."""
        return self.waits_until == _HAS_WAITED


@attrs.define(eq=False)
class Matcher:
    """Searches in sources, in their order. The engine's own stores are first."""

    _sources: Sequence[Source]
    """May change; a search uses the sources at its start."""
    _num_workers: int
    """The number of workers, which all have to load the pages."""
    _wait_timeout_s: float
    """How long a request waits for pages that are coming, and for answers of sources."""
    _stats: TransferStats
    """Counts pages that sources do not hold."""
    num_stores: int = 0
    """The number of leading sources that are the engine's own stores."""
    _unreadable: dict[tuple[str, bytes], float] = attrs.field(factory=dict, init=False)
    """Pages that workers could not read, by source and chain, and until when they are not promised."""

    def begin(self) -> Search:
        """Begin the search for a new request."""
        return Search([(source.name, source.inquire()) for source in self._sources])

    def held(self, search: Search, chains: list[bytes], first: int) -> tuple[int, tuple[Runs, ...]] | None:
        """How many pages from number ``first`` on every worker can load, and the sources for each worker.

        ``None``: not known yet.
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
        """Note pages that a worker could not read, each by its source and chain."""
        if pages:
            now = time.monotonic()
            self._unreadable = {page: until for page, until in self._unreadable.items() if until > now}
            self._unreadable |= dict.fromkeys(pages, now + _UNREADABLE_S)

    def _readable(self, name: str, presences: list[Presence], chains: list[bytes]) -> list[Presence]:
        """The presences of these pages in a source, up to the first that a worker could not read."""
        now = time.monotonic() if self._unreadable else 0.0
        for at, (chain, presence) in enumerate(zip(chains, presences, strict=False) if now else ()):
            if presence is Presence.HELD and self._unreadable.get((name, chain), 0.0) > now:
                return presences[:at]
        return presences

    def _promise(self, chains: list[bytes], at: int, count: int, rank: int, runs: Runs) -> None:
        """Tell peer engines which of their pages worker ``rank`` will load."""
        peers = {source.name: source for source in self._sources[self.num_stores :]}
        for name, length in first_of(runs, count):
            if name in peers:
                peers[name].promise(chains[at : at + length], rank)
            at += length

    def _held_by(self, search: Search, chains: list[bytes], first: int, rank: int) -> tuple[int, Runs] | None:
        """Like :meth:`held`, for worker ``rank``. A source is only asked for pages that earlier ones lack."""
        runs: list[tuple[str, int]] = []
        answers: dict[int, list[Presence]] = {}
        begun: dict[int, int] = {}
        at = first
        while at < len(chains):
            must_wait, taken = False, 0
            for number, (name, inquiry) in enumerate(search.inquiries):
                if number not in answers or at < begun[number] or at - begun[number] >= len(answers[number]):
                    known = inquiry(chains, at, rank)
                    if known is None:
                        must_wait = True
                        if number < self.num_stores and self._may_wait(search):
                            return None  # the engine's own stores are nearer than later sources
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
        """Whether the request keeps waiting for pages that are coming, or for a source's answer."""
        now = time.monotonic()
        if not search.waits_until:
            search.waits_until = now + self._wait_timeout_s
        if now < search.waits_until:
            return True
        search.waits_until = _HAS_WAITED
        return False


def _num_held(presences: list[Presence]) -> int:
    """The number of leading pages that are held."""
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
    """How many of the tokens ``start`` to ``end`` lie in each run; ``start`` lies in the first page."""
    found, at = [], start - start % page_tokens
    for name, count in runs:
        until = at + count * page_tokens
        if (num := min(end, until) - max(start, at)) > 0:
            found.append((name, num))
        at = until
    return found
