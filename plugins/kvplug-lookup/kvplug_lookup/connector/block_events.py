"""Events about blocks for routers, derived from events about pages.

A router matches requests by the *engine's* hashes of its blocks. The scheduler side knows which pages hold
which blocks when it plans their save. The stores' events show when every worker holds a page."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import attrs

from kvplug.engine import CacheEvent, Request
from kvplug.transport import PageEvent, Series

_MAX_EVENTS = 100_000
"""Limit on events that the engine has not taken. Beyond it the oldest are dropped."""
_MAX_IDLE = 1 << 15
"""Limit on pages that no worker holds: planned, or evicted and perhaps put again. Beyond it the oldest are
forgotten."""


@attrs.frozen(eq=False)
class _Block:
    """One block of the engine, or one page if the engine has no hashes."""

    hash: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    adapter: str
    chains: tuple[bytes, ...]
    """Chains of the pages that hold its tokens."""


@attrs.define(eq=False, slots=False, kw_only=True, repr=False)
class BlockEvents:
    """Knows the blocks of saved pages. Emits events when a block is held whole, and when it no longer is.

    Thread-safe: the scheduler plans in one thread, and stores report in others.
    """

    _num_workers: int
    _page_tokens: int
    _block_size: int
    _medium: str
    _owner: str

    def __attrs_post_init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks_of: dict[bytes, list[_Block]] = {}
        """Blocks by the chains of their pages."""
        self._holders: dict[bytes, set[int]] = {}
        """Workers that hold a page."""
        self._idle: dict[bytes, None] = {}
        """Chains of pages with blocks that no worker holds, the most recently held last."""
        self._snapshots: dict[int, tuple[int, set[bytes]]] = {}
        """By worker: how many events of its snapshot are missing, and the pages in those that arrived."""
        self._announced: dict[bytes, set[_Block]] = {}
        """Blocks that are held whole, by hash. Several pages may begin with the same block."""
        self._events: deque[CacheEvent] = deque(maxlen=_MAX_EVENTS)
        self._listeners: list[Callable[[Sequence[CacheEvent]], None]] = []

    def listen(self, listener: Callable[[Sequence[CacheEvent]], None]) -> None:
        """Call ``listener`` with all events from now on, in order. It must not block."""
        self._listeners.append(listener)

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    # -- the scheduler plans a save ------------------------------------------------------------

    def plan(self, request: Request, token_ids: Sequence[int], chains: Sequence[bytes], first: int) -> None:
        """Note that pages from number ``first`` on will be saved. ``chains``: of all the request's pages up
        to the last of these."""
        blocks = list(self._blocks(request, token_ids, chains, first))
        with self._lock:
            for block in blocks:
                for chain in block.chains:
                    known = self._blocks_of.setdefault(chain, [])
                    if all((each.hash, each.chains) != (block.hash, block.chains) for each in known):
                        known.append(block)
                    if chain not in self._holders:
                        self._idle[chain] = None
            self._emit(self._stored(chain for block in blocks for chain in block.chains))
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget the oldest idle pages beyond the limit. Needs the lock."""
        while len(self._idle) > _MAX_IDLE:
            chain = next(iter(self._idle))
            del self._idle[chain]
            for block in self._blocks_of.pop(chain):
                for other in set(block.chains) - {chain}:
                    self._blocks_of[other].remove(block)

    def _blocks(
        self, request: Request, token_ids: Sequence[int], chains: Sequence[bytes], first: int
    ) -> Iterable[_Block]:
        size, page = self._block_size, self._page_tokens
        hashes = request.block_hashes
        if not hashes:  # treat pages as blocks
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

    def apply(self, rank: int, event: PageEvent, series: Series) -> None:
        """Apply an event of a worker's store. Pages of other series are ignored.

        A snapshot changes nothing until it is complete: after a reconnect most pages are the same as before.
        """
        chains: Sequence[bytes] = ()
        if event.kind in ("stored", "removed") and event.series == series.id:
            chains = series.keys_of(event.keys)
        with self._lock:
            if event.kind == "snapshot":
                self._snapshots[rank] = event.count, set()
            elif rank in self._snapshots:
                left, pages = self._snapshots[rank]
                self._snapshots[rank] = left - 1, pages.union(chains)
            elif event.kind == "cleared":
                self._replace(rank, set(), is_cleared=True)
            elif event.kind == "stored":
                self._add(rank, chains)
            elif event.kind == "removed":
                self._remove(rank, chains)
            if rank in self._snapshots and not self._snapshots[rank][0]:
                self._replace(rank, self._snapshots.pop(rank)[1])

    def _replace(self, rank: int, pages: set[bytes], *, is_cleared: bool = False) -> None:
        """Note that worker ``rank`` holds exactly these pages. Needs the lock."""
        gone = [chain for chain, holders in self._holders.items() if rank in holders and chain not in pages]
        self._remove(rank, gone, is_cleared=is_cleared)
        self._add(rank, pages)

    def _add(self, rank: int, chains: Collection[bytes]) -> None:
        """Note that worker ``rank`` also holds these pages. Needs the lock."""
        for chain in chains:
            self._holders.setdefault(chain, set()).add(rank)
            self._idle.pop(chain, None)
        self._emit(self._stored(chains))

    def _remove(self, rank: int, chains: Iterable[bytes], *, is_cleared: bool = False) -> None:
        """Note that worker ``rank`` no longer holds these pages. Needs the lock."""
        gone: list[bytes] = []
        for chain in chains:
            holders = self._holders.get(chain, set())
            holders.discard(rank)
            for block in self._blocks_of.get(chain, ()):
                whole = self._announced.get(block.hash, set())
                if block in whole:
                    whole.remove(block)
                    if not whole:
                        del self._announced[block.hash]
                        gone.append(block.hash)
            if not holders:
                self._holders.pop(chain, None)
                if chain in self._blocks_of:
                    self._idle.pop(chain, None)
                    self._idle[chain] = None
        self._forget_idle()
        if gone and is_cleared:
            self._emit([CacheEvent(kind="cleared")])
        elif gone:
            self._emit(
                [CacheEvent(kind="removed", block_hashes=tuple(gone), medium=self._medium, owner=self._owner)]
            )

    def _stored(self, changed: Iterable[bytes]) -> list[CacheEvent]:
        """Return events for blocks that are now held whole. Needs the lock."""
        events: list[CacheEvent] = []
        for chain in changed:
            for block in self._blocks_of.get(chain, ()):
                if not all(map(self._is_held, block.chains)):
                    continue
                whole = self._announced.setdefault(block.hash, set())
                is_known = bool(whole)
                whole.add(block)
                if is_known:
                    continue
                events.append(
                    CacheEvent(
                        kind="stored",
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
        return events

    def _is_held(self, chain: bytes) -> bool:
        return len(self._holders.get(chain, ())) == self._num_workers

    def _emit(self, events: Sequence[CacheEvent]) -> None:
        """Needs the lock, so that listeners get events in the order of the changes."""
        self._events += events
        if events:
            for listener in self._listeners:
                listener(events)
