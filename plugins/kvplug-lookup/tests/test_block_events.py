"""The blocks that events announce to a router, after any order of connections, losses and evictions."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvplug.engine import CacheEvent
from kvplug.transport import PageEvent, Series
from kvplug.transport.store.format import opaque_format
from kvplug_lookup.connector import block_events
from kvplug_lookup.connector.block_events import BlockEvents
from kvplug_testing.engine import request_of

PAGE = 4
FORMAT = opaque_format(64)
SERIES = [Series(FORMAT, bytes([rank])) for rank in range(3)]
PROMPTS = [f"{prompt}{page}" for prompt in "ab" for page in range(4)]
"""Pages of two prompts."""


def chain_of(page: str) -> bytes:
    return page.encode() * 16


class Worker:
    """A worker's store, and its events that have not been delivered."""

    def __init__(self, rank: int) -> None:
        self.series = SERIES[rank]
        self.log = PageEvent.Log()
        self.held: set[str] = set()
        self.queued: list[PageEvent] = []
        self.is_connected = False

    def keys(self, pages: list[str]) -> tuple[bytes, ...]:
        return self.series.keys_of([chain_of(page) for page in pages])

    def put(self, page: str) -> None:
        if page not in self.held:
            self.held.add(page)
            self.send(self.log.stored(self.series.id, self.keys([page])))

    def send(self, event: PageEvent) -> None:
        if self.is_connected:
            self.queued.append(event)

    def connect(self, declared: list[str]) -> None:
        held = [[page] for page in sorted(self.held)]  # an event each, so that any of them may be lost
        snapshot = self.log.snapshot({}, [(self.series.id, self.keys(declared), 1.0)])
        stored = [attrs.evolve(self.log.stored(self.series.id, self.keys(page)), seq=1) for page in held]
        self.queued = [
            attrs.evolve(snapshot[0], count=len(stored) + len(snapshot) - 1),
            *stored,
            *snapshot[1:],
        ]
        self.is_connected = True


class Router(RuleBasedStateMachine):
    """Gets the events of workers whose stores put, evict, clear and restart. Connections to them break."""

    block_size = PAGE

    def __init__(self) -> None:
        super().__init__()
        self.workers = [Worker(rank) for rank in range(len(SERIES))]
        self.events = BlockEvents(
            num_workers=len(SERIES), page_tokens=PAGE, block_size=self.block_size, medium="CPU", owner="host"
        )
        self.events.listen(self.receive)
        self.announced: set[bytes] = set()
        self.planned: dict[bytes, list[tuple[str, ...]]] = {}

    def receive(self, events: list[CacheEvent]) -> None:
        for event in events:
            match event.kind:
                case "stored":
                    assert not self.announced.intersection(event.block_hashes), "the block is announced twice"
                    self.announced.update(event.block_hashes)
                case "removed":
                    assert self.announced.issuperset(event.block_hashes), "the block was not announced"
                    self.announced.difference_update(event.block_hashes)
                case "cleared":
                    self.announced.clear()

    @rule(prompt=st.sampled_from("ab"), first=st.integers(0, 3), last=st.integers(1, 4))
    def plan(self, prompt: str, first: int, last: int) -> None:
        pages = [f"{prompt}{page}" for page in range(last)]
        size = self.block_size
        hashes = [
            b"both" if not block else b"%s %d" % (prompt.encode(), block) for block in range(16 // size)
        ]
        request = attrs.evolve(request_of("r", range(16)), block_hashes=tuple(hashes))
        self.events.plan(request, range(16), [chain_of(page) for page in pages], first)
        for block in range(first * PAGE // size, last * PAGE // size):
            needed = tuple(pages[block * size // PAGE : -(-(block + 1) * size // PAGE)])
            if needed not in self.planned.setdefault(hashes[block], []):
                self.planned[hashes[block]].append(needed)

    @rule(rank=st.integers(0, 2), page=st.sampled_from(PROMPTS))
    def put(self, rank: int, page: str) -> None:
        self.workers[rank].put(page)

    @rule(page=st.sampled_from(PROMPTS))
    def all_put(self, page: str) -> None:
        for worker in self.workers:
            worker.put(page)

    @rule(rank=st.integers(0, 2), page=st.sampled_from(PROMPTS))
    def evict(self, rank: int, page: str) -> None:
        """Also the end of a declared page."""
        worker = self.workers[rank]
        worker.held.discard(page)
        worker.send(worker.log.removed(worker.series.id, worker.keys([page]), PageEvent.Removal.EVICTED))

    @rule(rank=st.integers(0, 2))
    def clear(self, rank: int) -> None:
        self.workers[rank].held.clear()
        self.workers[rank].send(self.workers[rank].log.cleared())

    @rule(rank=st.integers(0, 2))
    def put_another_series(self, rank: int) -> None:
        worker = self.workers[rank]
        worker.send(worker.log.stored(bytes(16), worker.keys([PROMPTS[0]])))

    @rule(rank=st.integers(0, 2), count=st.integers(0, 3))
    def lose(self, rank: int, count: int) -> None:
        """Break the connection, perhaps within a snapshot."""
        worker = self.workers[rank]
        self.deliver(rank, count)
        worker.queued, worker.is_connected = [], False

    @rule(rank=st.integers(0, 2))
    def restart(self, rank: int) -> None:
        self.lose(rank, 0)
        self.workers[rank].held.clear()

    @rule(rank=st.integers(0, 2), declared=st.lists(st.sampled_from(PROMPTS), unique=True, max_size=2))
    def connect(self, rank: int, declared: list[str]) -> None:
        if not self.workers[rank].is_connected:
            self.workers[rank].connect(declared)

    @rule(rank=st.integers(0, 2), count=st.integers(1, 3))
    def deliver(self, rank: int, count: int) -> None:
        worker = self.workers[rank]
        for event in worker.queued[:count]:
            self.events.apply(rank, event, worker.series)
        del worker.queued[:count]

    @rule()
    def deliver_all(self) -> None:
        for rank, worker in enumerate(self.workers):
            self.connect(rank, [])
            self.deliver(rank, len(worker.queued))

    @invariant()
    def announced_blocks_are_held(self) -> None:
        if not all(worker.is_connected and not worker.queued for worker in self.workers):
            return
        held = set.intersection(*(worker.held for worker in self.workers))
        whole = {block for block, ways in self.planned.items() if any(map(held.issuperset, ways))}
        assert self.announced == whole


class RouterOfSmallBlocks(Router):
    """Two blocks in a page: the prompts' first pages begin with one block."""

    block_size = PAGE // 2


class RouterOfLargeBlocks(Router):
    """Two pages in a block."""

    block_size = PAGE * 2


for machine in (Router, RouterOfSmallBlocks, RouterOfLargeBlocks):
    globals()[f"Test{machine.__name__}"] = machine.TestCase
    machine.TestCase.settings = settings(stateful_step_count=40)


def test_blocks_of_pages_that_no_worker_holds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "_MAX_IDLE", 10)
    events = BlockEvents(num_workers=1, page_tokens=PAGE, block_size=PAGE, medium="CPU", owner="host")
    received: list[CacheEvent] = []
    events.listen(received.extend)
    log, series = PageEvent.Log(), SERIES[0]

    def plan(number: int) -> list[bytes]:
        chains = [bytes([number, page]) * 16 for page in range(2)]
        events.plan(request_of("a", range(8)), range(8), chains, 0)
        return chains

    def receive(*changes: PageEvent) -> list[str]:
        received.clear()
        for event in changes:
            events.apply(0, event, series)
        return [event.kind for event in received]

    kept = series.keys_of(plan(255))
    assert receive(*log.snapshot({series.id: kept})) == ["stored"] * 2
    planned = [series.keys_of(plan(number)) for number in range(200)]
    assert receive(log.stored(series.id, planned[194])) == [], (
        "blocks of idle pages beyond the limit are remembered"
    )
    assert receive(log.stored(series.id, planned[195])) == ["stored"] * 2
    assert receive(log.removed(series.id, kept, PageEvent.Removal.EVICTED)) == ["removed"]
