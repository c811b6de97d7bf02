"""A discrete-event simulation: conversations arrive, their turns are routed, matched, loaded, computed and
saved.

A unit is 512 tokens: a part of a system prompt, or a turn of a conversation (a user's or tool's text and the
answer). A turn's prompt is the system prompt and all turns before it. Its pages come from the engine's own
prefix cache, then from its store, then from peers' stores or the shared one; what none has is computed and
saved, the prompt's pages with the step that computes them, those of the answer one by one.

Time passes for computing (an engine computes one prompt after the other), for the bytes of a load at the
store that sends them (one load after the other), for the answer, and between turns. A load that is expected
to take longer than computing is not made. Times of lookups, events and fences are not
simulated: what they cost is added up, and is compared with what a process can do.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_left
from typing import Any

import attrs

from scale.cluster import Cluster, Topology, Unit
from scale.model import StoreUse, Traffic

MARGIN = 1.1
"""A load may take so much longer than computing. The connector (``load_cost.py``) allows more."""


@attrs.frozen(kw_only=True)
class Workload:
    """What the users and the engines do."""

    requests: float = 1.0
    """A second, for each engine."""
    systems: int = 500
    """System prompts, which follow a Zipf law."""
    zipf: float = 1.0
    system_units: int = 4
    turns: float = 6.0
    """Of a conversation, on average; their number is geometric."""
    think_s: float = 20.0
    """Between an answer and the next turn, on average."""
    page_tokens: int = 16
    unit_pages: int = 32
    answer_pages: int = 16
    """The part of a turn's unit that is the answer."""
    chunk_pages: int = 256
    """Most pages that a step computes."""
    page_bytes: int = 2 << 20
    store_units: int = 1024
    """Of an engine's store: 64 GiB."""
    cache_units: int = 320
    """Of an engine's own prefix cache: 20 GiB."""
    prefill_tokens_per_s: float = 8000.0
    answer_s: float = 5.0


@attrs.define(kw_only=True)
class Counts:
    """What happened while it was counted."""

    seconds: float = 0.0
    requests: int = 0
    units: int = 0
    """Of prompts, but for the turn that is new."""
    cached: int = 0
    own: int = 0
    peer: int = 0
    """From another engine's store."""
    shared: int = 0
    computed: int = 0
    too_slow: int = 0
    """Units that a store had, and that were computed since the load would have taken longer."""
    loads: int = 0
    puts: int = 0
    pages_put: int = 0
    events: int = 0
    event_pages: int = 0
    sent: list[int] = attrs.field(factory=list)
    """Units that each store has sent to other engines."""
    busy: list[float] = attrs.field(factory=list)
    """Seconds that each engine has computed prompts."""
    wait_s: float = 0.0
    """Between the arrival of a request and the begin of its answer, in total."""

    def traffic(self, engines: int) -> Traffic:
        """Of an engine, on average, for each second."""
        each = self.seconds * engines
        return Traffic(
            requests=self.requests / each, events=self.events / each, event_pages=self.event_pages / each
        )

    def store_use(self, engines: int, pages_of_unit: int) -> StoreUse:
        """Of an engine at the store that it shares."""
        each = self.seconds * engines
        return StoreUse(
            lookups=self.requests / each,
            puts=self.puts / each,
            pages_put=self.pages_put / each,
            pages_got=self.shared * pages_of_unit / each,
        )

    @property
    def hit_rate(self) -> float:
        """The part of the units that were not computed again."""
        return 1 - self.computed / self.units if self.units else 0.0

    def sent_bytes_per_s(self, unit_bytes: int) -> tuple[float, float]:
        """Of the busiest store, and of all stores on average."""
        if not self.sent:
            return 0.0, 0.0
        return max(self.sent) * unit_bytes / self.seconds, sum(self.sent) * unit_bytes / self.seconds / len(
            self.sent
        )


class Simulation:
    """Conversations on a cluster, from a seed: the same seed gives the same counts."""

    def __init__(
        self,
        engines: int,
        topology: Topology,
        workload: Workload,
        *,
        bytes_per_s: float,
        stored_pages: float = 2.0,
        removed_per_put: float = 1.0,
        is_full: bool = True,
        seed: int = 1,
    ) -> None:
        """
        Args:
            is_full: the stores begin full of pages that no prompt needs any more.
            bytes_per_s: that one store sends to others.
            stored_pages: in one event.
            removed_per_put: events of evicted pages of a put into a full store.
        """
        self.engines = engines
        self.workload = workload
        self.bytes_per_s = bytes_per_s
        self._stored_pages = stored_pages
        self._removed_per_put = removed_per_put
        self._rng = random.Random(seed)
        self.cluster = Cluster(
            engines, topology, store_units=workload.store_units, cache_units=workload.cache_units
        )
        if is_full:
            self.cluster.fill()
        self._computes_until = [0.0] * engines
        self._sends_until = [0.0] * len(self.cluster.stores)
        self._heap: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        weights = [1 / rank**workload.zipf for rank in range(1, workload.systems + 1)]
        self._sums = list(itertools.accumulate(weights))
        self.counts = Counts()
        self._is_counting = False

    def run(self, *, warm_s: float, seconds: float) -> Counts:
        """Simulate; what happens before ``warm_s`` is not counted."""
        self._later(0.0, ("new",))
        end = warm_s + seconds
        while self._heap and self._heap[0][0] < end:
            now, _, (what, *given) = heapq.heappop(self._heap)
            if not self._is_counting and now >= warm_s:
                self._is_counting = True
                self.counts = Counts(
                    seconds=seconds,
                    sent=[0] * len(self.cluster.stores),
                    busy=[0.0] * self.engines,
                )
            if what == "new":
                self._begin(now)
            elif what == "turn":
                self._turn(now, *given)
            elif what == "computed":
                self._save(*given)
            else:
                self._answered(now, *given)
        return self.counts

    def _later(self, at: float, what: tuple[Any, ...]) -> None:
        heapq.heappush(self._heap, (at, next(self._numbers), what))

    def _begin(self, now: float) -> None:
        rng, load = self._rng, self.workload
        rate = load.requests * self.engines / load.turns
        self._later(now + rng.expovariate(rate), ("new",))
        system = bisect_left(self._sums, rng.random() * self._sums[-1])
        units: list[Unit] = [("system", system, part) for part in range(load.system_units)]
        self._later(now, ("turn", next(self._numbers), units))

    # -- a turn ----------------------------------------------------------------------------------

    def _turn(self, now: float, conversation: int, units: list[Unit]) -> None:
        load, cluster, counts = self.workload, self.cluster, self.counts
        engine = self._route(now, units)
        cached = cluster.caches[engine].held(units)
        own = cluster.store_of(engine)
        is_shared = cluster.topology.stores != "own"
        unit_bytes, unit_tokens = load.unit_pages * load.page_bytes, load.unit_pages * load.page_tokens
        unit_s = unit_tokens / load.prefill_tokens_per_s
        at, ready = cached, now
        for source, count in cluster.match(engine, units, cached):
            if source != own or is_shared:
                begin = max(now, self._sends_until[source])
                ends = begin + count * unit_bytes / self.bytes_per_s
                if ends - now > MARGIN * count * unit_s:
                    counts.too_slow += count
                    break
                self._sends_until[source] = ends
                ready = max(ready, ends)
                counts.loads += 1
                if self._is_counting:
                    counts.sent[source] += count
                if is_shared:
                    counts.shared += count
                else:
                    counts.peer += count
            else:
                counts.own += count
            cluster.stores[source].use(units[at : at + count])
            at += count
        missing = len(units) - at
        counts.requests += 1
        counts.units += len(units)
        counts.cached += cached
        counts.computed += missing
        prompt_pages = load.unit_pages - load.answer_pages
        seconds = missing * unit_s + prompt_pages * load.page_tokens / load.prefill_tokens_per_s
        start = max(ready, self._computes_until[engine])
        end = self._computes_until[engine] = start + seconds
        if self._is_counting:
            counts.busy[engine] += seconds
            counts.wait_s += end - now
        new = ("turn", conversation, len(units))
        self._later(end, ("computed", engine, units, at, new))
        self._later(end + load.answer_s, ("answered", engine, conversation, units, new))

    def _save(self, engine: int, units: list[Unit], first: int, new: Unit) -> None:
        """The prompt is computed: what was missing of it, and the turn's own part, are saved."""
        load, cluster = self.workload, self.cluster
        cluster.caches[engine].note(units)
        saved, gone = cluster.save(engine, units[first:])
        pages = saved * load.unit_pages + load.unit_pages - load.answer_pages
        puts = -(-pages // load.chunk_pages)
        self._count(puts, pages, is_full=gone > 0 or self._is_full(engine))

    def _answered(self, now: float, engine: int, conversation: int, units: list[Unit], new: Unit) -> None:
        """The answer is whole: its pages were saved one by one."""
        load = self.workload
        self.cluster.caches[engine].note([*units, new])
        self.cluster.save(engine, [new])
        self._count(load.answer_pages, load.answer_pages, is_full=self._is_full(engine))
        if self._rng.random() >= 1 / load.turns:
            pause = self._rng.expovariate(1 / load.think_s)
            self._later(now + pause, ("turn", conversation, [*units, new]))

    def _is_full(self, engine: int) -> bool:
        store = self.cluster.stores[self.cluster.store_of(engine)]
        return len(store.units) >= store.size

    def _count(self, puts: int, pages: int, *, is_full: bool) -> None:
        """A put is declared, stored in one or more parts, and makes room where the store is full."""
        counts = self.counts
        counts.puts += puts
        counts.pages_put += pages
        stored = puts * math.ceil(pages / puts / self._stored_pages)
        counts.events += round(puts * (1 + (self._removed_per_put if is_full else 0.0)) + stored)
        counts.event_pages += pages * (3 if is_full else 2)

    # -- where a request goes ------------------------------------------------------------------

    def _route(self, now: float, units: list[Unit]) -> int:
        rng = self._rng
        if not self.cluster.topology.routed:
            return rng.randrange(self.engines)
        limit = now + 1.0  # an engine with more than a second of prompts before it gets no other
        for unit in reversed(units):
            holders = self.cluster.holders.get(unit)
            if holders:
                best = min(self._some(holders), key=self._computes_until.__getitem__)
                if self._computes_until[best] < limit:
                    return best
        return min(rng.choices(range(self.engines), k=2), key=self._computes_until.__getitem__)

    def _some(self, holders: dict[int, None]) -> list[int]:
        """At most 16 of them: a router does not compare a thousand."""
        if len(holders) <= 16:
            return list(holders)
        begin = self._rng.randrange(len(holders) - 15)
        return list(itertools.islice(holders, begin, begin + 16))
