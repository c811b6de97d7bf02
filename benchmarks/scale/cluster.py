"""Which engine holds which pages: stores that evict, and who sees whom. Without time."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import attrs

from kvplug_host.eviction import Eviction

Unit = Hashable
"""Consecutive pages of a prompt that are saved and used together."""


def _key(unit: Unit) -> bytes:
    return repr(unit).encode()


class UnitStore:
    """A store of units, which evicts as the store "host" does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.units: dict[Unit, None] = {}
        self._of_key: dict[bytes, Unit] = {}
        self._order = Eviction()

    def use(self, units: Sequence[Unit]) -> None:
        """They were used; the last goes first."""
        for unit in reversed(units):
            if unit in self.units:
                self._order.use(_key(unit))

    def add(self, unit: Unit) -> list[Unit]:
        """It comes, unless it is there. Returns those that went."""
        if unit in self.units:
            return []
        gone: list[Unit] = []
        while len(self.units) >= self.size:
            key = self._order.victim(lambda key: True)
            assert key is not None
            victim = self._of_key.pop(key)
            del self.units[victim]
            gone.append(victim)
        self.units[unit] = None
        self._of_key[_key(unit)] = unit
        self._order.add(_key(unit))
        return gone


class Lru:
    """The engine's own prefix cache."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._units: OrderedDict[Unit, None] = OrderedDict()

    def held(self, units: Sequence[Unit]) -> int:
        """How many of them, from the first on."""
        return sum(1 for _ in itertools.takewhile(self._units.__contains__, units))

    def note(self, units: Sequence[Unit]) -> None:
        """They were used, or came."""
        for unit in reversed(units):
            if unit in self._units:
                self._units.move_to_end(unit)
            elif self._size:
                self._units[unit] = None
                if len(self._units) > self._size:
                    self._units.popitem(last=False)


@attrs.frozen(kw_only=True)
class Topology:
    """Who sees whom.

    ``group``: engines in a group, which see each other; 1: nobody sees another. ``stores``: "own", or
    "shared", one for each group. ``routed``: requests go where their prefix is, instead of to any engine.
    """

    name: str
    group: float = math.inf
    stores: str = "own"
    routed: bool = False

    def members(self, engines: int) -> int:
        """Engines of a group."""
        return int(min(self.group, engines))

    def peers(self, engines: int) -> int:
        """Of one engine."""
        return self.members(engines) - 1 if self.stores == "own" else 0


OWN, SHARED = "own", "shared"
Runs = list[tuple[int, int]]
"""The number of a store, and so many units, one after the other."""


class Cluster:
    """The stores of all engines, and where each unit is.

    Engine ``e`` saves into store ``e``, or, where stores are shared, into that of its group.
    """

    def __init__(self, engines: int, topology: Topology, *, store_units: int, cache_units: int) -> None:
        self.topology = topology
        self.engines = engines
        self.group = topology.members(engines)
        is_own = topology.stores == OWN
        count = engines if is_own else -(-engines // self.group)
        self.stores = [UnitStore(store_units * (1 if is_own else self.group)) for _ in range(count)]
        self.caches = [Lru(cache_units) for _ in range(engines)]
        self.holders: dict[Unit, dict[int, None]] = {}

    def fill(self) -> None:
        """Every store is full of pages that no prompt needs any more."""
        for number, store in enumerate(self.stores):
            for at in range(store.size):
                store.add(("old", number, at))

    def store_of(self, engine: int) -> int:
        """The store that an engine saves into."""
        return engine if self.topology.stores == OWN else engine // self.group

    def match(self, engine: int, units: Sequence[Unit], first: int) -> Runs:
        """Where the units from number ``first`` on are, up to the first that no store which the engine sees
        has: its own store before its peers, and these in the order of their list, which begins after the
        engine."""
        runs: Runs = []
        for unit in itertools.islice(units, first, None):
            source = self._source(engine, unit)
            if source is None:
                break
            if runs and runs[-1][0] == source:
                runs[-1] = (source, runs[-1][1] + 1)
            else:
                runs.append((source, 1))
        return runs

    def _source(self, engine: int, unit: Unit) -> int | None:
        holders = self.holders.get(unit)
        if not holders:
            return None
        own = self.store_of(engine)
        if own in holders:
            return own
        if self.topology.stores != OWN or self.group == 1:
            return None
        begin = engine // self.group * self.group
        size = min(self.group, self.engines - begin)
        if len(holders) > size:
            seen = [begin + at for at in range(size) if begin + at in holders]
        else:
            seen = [holder for holder in holders if begin <= holder < begin + size]
        return min(seen, key=lambda holder: (holder - engine) % size, default=None)

    def save(self, engine: int, units: Sequence[Unit]) -> tuple[int, int]:
        """Returns how many were new to the store, and how many went for them."""
        number = self.store_of(engine)
        store = self.stores[number]
        new = gone = 0
        for unit in units:
            if unit in store.units:
                continue
            new += 1
            for victim in store.add(unit):
                gone += 1
                holders = self.holders.get(victim)
                if holders is not None:
                    holders.pop(number, None)
                    if not holders:
                        del self.holders[victim]
            self.holders.setdefault(unit, {})[number] = None
        return new, gone
