"""Where the scheduler side looks for pages: replicas of stores with events, and stores that must be asked.

All workers of this engine can load from a *source*. It is a store that every process reaches, or the stores
of one engine's workers, each for the worker of its rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvplug import Config, KvplugError
from kvplug.engine import ConnectorContext, Engine, Role
from kvplug.transport import Job, PageEvent, Presence, Series, Store
from kvplug_lookup.connector.page_index import PageIndex
from kvplug_lookup.connector.replica import Replica

_ASK_AGAIN_S = 0.02
"""The pause before asking again about a page that is coming."""
_REST_S = 60.0
"""How long a worker refuses a slow store before it tries again."""


Inquiry = Callable[[list[bytes], int, int], list[Presence] | None]
"""One request's questions to one source. ``inquiry(chains, first, rank)`` returns the presences for worker
``rank`` of the pages from number ``first`` on, in order, up to the first that is absent. ``None``: not known
yet."""


class Source:
    """The stores of one engine's workers, whose events are followed."""

    replicas: tuple[Replica, ...] = ()
    """Replicas of the stores, by worker."""
    engine: Engine | None = None
    """The engine, if a directory has announced it."""
    _rests_until = float("-inf")

    def __init__(self, name: str) -> None:
        self.name = name
        """The name in load plans: the store's name, or ``peer`` and an address."""

    def inquire(self) -> Inquiry:
        """Begin an inquiry for a new request. It sees everything that was saved before."""
        fences = [replica.fence() for replica in self.replicas]

        def presences(chains: list[bytes], first: int, rank: int) -> list[Presence] | None:
            if self.is_resting:
                return []
            replica = self.replicas[rank]
            return replica.presences(chains, first) if replica.has_passed(fences[rank]) else None

        return presences

    @property
    def is_up(self) -> bool:
        """Whether every worker's events are followed now."""
        return all(replica.link is not None for replica in self.replicas)

    def expect(self, chains: Sequence[bytes], for_s: float) -> None:
        """Note that the workers will put these pages in the next step."""
        for replica in self.replicas:
            replica.expect(chains, for_s)

    def settle(self, chains: Iterable[bytes], rank: int) -> None:
        """Note that worker ``rank`` has put these pages, or has given them up."""
        return None  # replicas learn it from events

    def promise(self, chains: Sequence[bytes], rank: int) -> None:
        """Tell the source that worker ``rank`` will load these pages. Does not wait."""
        for replica in self.replicas[rank : rank + 1]:
            replica.promise(chains)

    @property
    def is_expecting(self) -> bool:
        """Whether workers have not yet reported the results of some puts."""
        return False

    def doubt(self) -> None:
        """Note that a load from it stalled."""
        for replica in self.replicas:
            replica.doubt(is_silent=True)

    def rest(self) -> None:
        """Note that a worker refuses it for a while because it is slow."""
        self._rests_until = time.monotonic() + _REST_S

    @property
    def is_resting(self) -> bool:
        """Whether nothing is loaded from it now."""
        return time.monotonic() < self._rests_until

    def drop(self) -> None:
        """Note that it was cleared."""
        for replica in self.replicas:
            replica.doubt()

    @property
    def is_cleared(self) -> bool:
        """Whether it certainly has no pages now."""
        return bool(self.replicas) and all(replica.is_cleared for replica in self.replicas)

    def refuse(self) -> None:
        """Note that its workers' pages do not fit this engine."""
        for replica in self.replicas:
            replica.refuse()

    def end(self) -> None:
        """Like :meth:`close`, without waiting for its threads."""
        for replica in self.replicas:
            replica.end()

    def close(self) -> None:
        """Idempotent."""
        self.end()
        for replica in self.replicas:
            replica.close()


def peers_of(config: Config, has_stores: bool) -> list[tuple[str, str | None]]:
    """The source names and addresses of the engines in the config; ``None``: the config's host and port.

    ``has_stores``: this engine saves, or can load from its own stores.
    """
    addresses: list[str | None] = [*config.peer_addresses]
    if not addresses and not has_stores and config.directory is None:
        addresses = [None]
    return [(f"peer {address or ''}".strip(), address) for address in addresses]


def followed(
    context: ConnectorContext,
    name: str,
    peer: str | Mapping[int, str] | None = None,
    listener: Callable[[int, PageEvent, Series], None] | None = None,
) -> Source:
    """Follow the stores of the workers of this engine, of its peer, or of the engine ``peer``.

    Args:
        peer: the address of its worker 0, or the contacts of its workers from a directory.
        listener: receives their events, with the worker's rank and the series of its pages.
    """
    whose = "the peer engine's" if context.config.role is Role.CONSUMER else "this engine's"
    if isinstance(peer, str):
        whose = f"the engine at {peer}:"
    elif peer is not None:
        whose = f"{name}:"
    source = Source(name)
    try:
        for rank in range(context.parallelism.num_workers):
            source.replicas += (Replica(context, rank, f"{whose} worker {rank}", peer, listener),)
    except BaseException:
        source.end()
        raise
    return source


class AskedSource(Source):
    """A store without events that every process reaches: it is asked about each request."""

    def __init__(self, name: str, store: Store, num_workers: int, wait_timeout_s: float) -> None:
        super().__init__(name)
        self.store = store
        self._wait_timeout_s = wait_timeout_s
        self.series: list[Series | None] = [None] * num_workers
        """The series of each worker's pages, once the worker has reported its shard."""
        self._coming = [PageIndex() for _ in range(num_workers)]
        """For each worker, the pages that it is putting."""
        self._doubted_until = 0.0

    def inquire(self) -> Inquiry:
        answers = [_Answers(self, rank) for rank in range(len(self.series))]
        return lambda chains, first, rank: answers[rank].presences(chains, first)

    def expect(self, chains: Sequence[bytes], for_s: float) -> None:
        for index in self._coming:
            index.expect(chains, for_s)

    def settle(self, chains: Iterable[bytes], rank: int) -> None:
        self._coming[rank].settle(chains)

    @property
    def is_expecting(self) -> bool:
        return any(index.is_expecting for index in self._coming)

    def is_coming(self, chain: bytes, rank: int) -> bool:
        """Whether the worker is putting that page."""
        return self._coming[rank].presence(chain) is Presence.COMING

    def doubt(self) -> None:
        self._doubted_until = time.monotonic() + self._wait_timeout_s

    def ask(self, keys: Sequence[bytes]) -> Job[Presence] | None:
        """Look up these pages; ``None`` if the store cannot be asked now."""
        if time.monotonic() < self._doubted_until:
            return None
        try:
            return self.store.submit_lookup(keys, timeout=self._wait_timeout_s)
        except KvplugError:
            return None

    def close(self) -> None:
        self.store.abort()


class _Answers:
    """The store's answers to one request about the pages of one worker. Asks about each page once, and
    repeatedly about pages that were coming when it last asked."""

    def __init__(self, source: AskedSource, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._held: set[bytes] = set()
        self._ask_again_at: dict[bytes, float] = {}
        """When to ask again about pages that were absent; never, if they were not coming."""
        self._asked: list[tuple[bytes, bool]] = []
        """Chains of the open question, and whether their pages were coming then."""
        self._job: Job[Presence] | None = None

    def presences(self, chains: list[bytes], first: int) -> list[Presence] | None:
        source, series = self._source, self._source.series[self._rank]
        if series is None or source.is_resting:
            return []
        if not self._take():
            return None
        found = []
        for number, chain in enumerate(chains[first:], first):
            if chain in self._held:
                found.append(Presence.HELD)
            elif self._must_ask(chain) and self._ask(series, chains[number:]):
                return self.presences(chains, first)
            elif source.is_coming(chain, self._rank):
                found.append(Presence.COMING)
            else:
                break
        return found

    def _must_ask(self, chain: bytes) -> bool:
        """Whether the page's absence is not known, or no longer."""
        return time.monotonic() >= self._ask_again_at.get(chain, 0.0)

    def _ask(self, series: Series, chains: list[bytes]) -> bool:
        """Ask about the pages that need it. Return whether the store could be asked."""
        asked = [chain for chain in chains if chain not in self._held and self._must_ask(chain)]
        coming = [self._source.is_coming(chain, self._rank) for chain in asked]
        job = self._source.ask(series.keys_of(asked))
        if job is not None:
            self._asked, self._job = list(zip(asked, coming, strict=True)), job
        return job is not None

    def _take(self) -> bool:
        """Note the store's answer. Return whether no question is open."""
        if self._job is None:
            return True
        results = self._job.results()
        if results is None:
            return False
        again = time.monotonic() + _ASK_AGAIN_S
        for (chain, was_coming), presence in zip(self._asked, results, strict=True):
            if presence is Presence.HELD:
                self._held.add(chain)
            else:
                self._ask_again_at[chain] = again if was_coming else math.inf
        self._job = None
        return True
