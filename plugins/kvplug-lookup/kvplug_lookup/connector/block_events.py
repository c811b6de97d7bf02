"""Events about blocks, for routers: made of what is known of pages.

A router matches requests by the *engine's* hashes of its blocks. The scheduler side knows which pages hold
which blocks when it plans their save, and learns from the stores' events when every worker holds a page."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import attrs

from kvplug.engine import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent, Request
from kvplug.transport import PageEvent, PagesCleared, PagesRemoved, PagesSnapshot, PagesStored, Series

_MAX_EVENTS = 100_000
"""Events that the engine has not taken. Beyond it the oldest are dropped: it does not take any."""
_MAX_PLANNED = 100_000
"""Pages that are planned and not held. Beyond it the oldest are forgotten: their saves were given up."""


@attrs.frozen(eq=False)
class _Block:
    """One block of the engine, or one page where the engine has no hashes."""

    hash: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    adapter: str
    chains: tuple[bytes, ...]
    """Of the pages that have its tokens."""


class BlockEvents:
    """Knows the blocks of pages that are saved, and says when all of a block is held, and when no more.

    Thread-safe: the scheduler plans in one thread, and stores report in others.
    """

    def __init__(
        self, *, num_workers: int, page_tokens: int, block_size: int, medium: str, owner: str
    ) -> None:
        self._num_workers = num_workers
        self._page_tokens = page_tokens
        self._block_size = block_size
        self._medium = medium
        self._owner = owner
        self._lock = threading.Lock()
        self._blocks_of: dict[bytes, list[_Block]] = {}
        """Blocks by the chains of their pages, of pages that are held or planned."""
        self._holders: dict[bytes, set[int]] = {}
        """Workers that hold a page."""
        self._announced: set[bytes] = set()
        self._events: deque[CacheEvent] = deque(maxlen=_MAX_EVENTS)
        self._listeners: list[Callable[[Sequence[CacheEvent]], None]] = []

    def listen(self, listener: Callable[[Sequence[CacheEvent]], None]) -> None:
        """Call ``listener`` with all events from now on, in order. It must not block."""
        self._listeners.append(listener)

    def take(self) -> list[CacheEvent]:
        """The events since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    # -- the scheduler plans a save ------------------------------------------------------------

    def plan(self, request: Request, token_ids: Sequence[int], chains: Sequence[bytes], first: int) -> None:
        """Pages ``first`` and on of this request are going to be saved. ``chains``: of all its pages up to
        the last of these."""
        blocks = list(self._blocks(request, token_ids, chains, first))
        with self._lock:
            for block in blocks:
                for chain in block.chains:
                    known = self._blocks_of.setdefault(chain, [])
                    if all(each.hash != block.hash for each in known):
                        known.append(block)
            self._forget_planned()
            events = self._stored({chain for block in blocks for chain in block.chains})
        self._tell(events)

    def _forget_planned(self) -> None:
        """With the lock: no more than so many."""
        if len(self._blocks_of) - len(self._holders) <= 2 * _MAX_PLANNED:
            return
        planned = [chain for chain in self._blocks_of if chain not in self._holders]
        for chain in planned[:-_MAX_PLANNED]:
            del self._blocks_of[chain]

    def _blocks(
        self, request: Request, token_ids: Sequence[int], chains: Sequence[bytes], first: int
    ) -> Iterable[_Block]:
        size, page = self._block_size, self._page_tokens
        hashes = request.block_hashes
        if not hashes:  # pages are the blocks
            size, hashes = page, chains
        for number in range(first * page // size, len(chains) * page // size):
            if number >= len(hashes):
                return
            begin, end = number * size, (number + 1) * size
            yield _Block(
                bytes(hashes[number]),
                bytes(hashes[number - 1]) if number else None,
                tuple(token_ids[begin:end]),
                request.adapter,
                tuple(chains[begin // page : -(-end // page)]),
            )

    # -- a store reports -----------------------------------------------------------------------

    def hear(self, rank: int, event: PageEvent, series: Series) -> None:
        """A worker's store tells of its pages, of which those of ``series`` are the worker's."""
        match event:
            case PagesSnapshot() | PagesCleared():
                self.cleared(rank)
            case PagesStored() if event.series == series.id:
                self.stored(rank, series.keys_of(event.keys))
            case PagesRemoved() if event.series == series.id:
                self.removed(rank, series.keys_of(event.keys))

    def stored(self, rank: int, chains: Iterable[bytes]) -> None:
        """Worker ``rank`` holds these pages."""
        with self._lock:
            changed = set()
            for chain in chains:
                holders = self._holders.setdefault(chain, set())
                holders.add(rank)
                changed.add(chain)
            events = self._stored(changed)
        self._tell(events)

    def removed(self, rank: int, chains: Iterable[bytes]) -> None:
        """Worker ``rank`` holds these pages no more, or does not get them."""
        with self._lock:
            gone: list[bytes] = []
            for chain in chains:
                holders = self._holders.get(chain, set())
                holders.discard(rank)
                for block in self._blocks_of.get(chain, ()):
                    if block.hash in self._announced:
                        self._announced.discard(block.hash)
                        gone.append(block.hash)
                if not holders:
                    self._holders.pop(chain, None)
                    self._blocks_of.pop(chain, None)
            events: list[CacheEvent] = []
            if gone:
                events.append(BlocksRemoved(block_hashes=tuple(gone), medium=self._medium, owner=self._owner))
            self._events += events
        self._tell(events)

    def cleared(self, rank: int) -> None:
        """Worker ``rank`` holds no page any more."""
        with self._lock:
            chains = [chain for chain, holders in self._holders.items() if rank in holders]
            had = bool(self._announced)
            for chain in chains:
                self._holders.pop(chain, None)
                self._blocks_of.pop(chain, None)
            self._announced.clear()
            events: list[CacheEvent] = [BlocksCleared()] if had else []
            self._events += events
        self._tell(events)

    def _stored(self, changed: set[bytes]) -> list[CacheEvent]:
        """With the lock: events of blocks that are wholly held now."""
        events: list[CacheEvent] = []
        for chain in changed:
            for block in self._blocks_of.get(chain, ()):
                if block.hash in self._announced or not all(map(self._is_held, block.chains)):
                    continue
                self._announced.add(block.hash)
                events.append(
                    BlocksStored(
                        block_hashes=(block.hash,),
                        token_ids=block.token_ids,
                        block_size=len(block.token_ids),
                        parent_hash=block.parent,
                        medium=self._medium,
                        owner=self._owner,
                        adapter=block.adapter,
                        chains=block.chains,
                    )
                )
        self._events += events
        return events

    def _is_held(self, chain: bytes) -> bool:
        return len(self._holders.get(chain, ())) == self._num_workers

    def _tell(self, events: Sequence[CacheEvent]) -> None:
        if events:
            for listener in self._listeners:
                listener(events)
