"""Where the scheduler side looks for pages: replicas of stores with events, and stores that must be asked.

All workers of this engine can load from a *source*. It is a store that every process reaches, or the stores
of one engine's workers, each for the worker of its rank."""

from __future__ import annotations

import abc
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvplug import Config, KvplugError
from kvplug.engine import ConnectorContext, PeerLink, Role
from kvplug.transport import Job, PageEvent, Presence, Series, Store
from kvplug_lookup.connector.page_index import PageIndex
from kvplug_lookup.connector.replica import Replica

_ASK_AGAIN_S = 0.02
"""The pause before asking again about a page that is coming."""
_REST_S = 60.0
"""How long a worker refuses a slow store before it tries again."""


class Inquiry(abc.ABC):
    """One request's questions to one source."""

    @abc.abstractmethod
    def presences(self, chains: list[bytes], first: int, rank: int) -> list[Presence] | None:
        """The presences for worker ``rank`` of the pages from number ``first`` on, in order, up to the first
        that is absent. ``None``: not known yet."""


class Source(abc.ABC):
    """One source of pages for all workers of this engine."""

    name: str
    """The name in load plans: the store's name, or ``peer`` and an address."""
    replicas: tuple[Replica, ...] = ()
    """Replicas of stores whose events are followed, by worker."""
    _rests_until = float("-inf")

    @abc.abstractmethod
    def inquire(self) -> Inquiry:
        """Begin an inquiry for a new request. It sees everything that was saved before."""

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
            replica.doubt()

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
            replica.drop()

    @property
    def is_cleared(self) -> bool:
        """Whether it certainly has no pages now."""
        return bool(self.replicas) and all(replica.is_cleared for replica in self.replicas)

    def refuse(self) -> None:
        """Note that its workers' pages do not fit this engine."""
        for replica in self.replicas:
            replica.refuse()

    @abc.abstractmethod
    def close(self) -> None:
        """Idempotent."""


class FollowedSource(Source):
    """The stores of one engine's workers, whose events are followed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def inquire(self) -> Inquiry:
        return _Followed(self)

    @property
    def is_connected(self) -> bool:
        """Whether every worker's events are followed now."""
        return all(replica.link is not None for replica in self.replicas)

    def end(self) -> None:
        """Like :meth:`close`, without waiting for its threads."""
        for replica in self.replicas:
            replica.end()

    def close(self) -> None:
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
) -> FollowedSource:
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
    retry = peer is None or isinstance(peer, str)

    def connector_to(rank: int) -> Callable[[float], PeerLink]:
        return lambda timeout: context.peers.connect(rank, "events", timeout=timeout, retry=retry, peer=peer)

    source = FollowedSource(name)
    try:
        for rank in range(context.parallelism.num_workers):
            replica = Replica(
                connector_to(rank),
                name=f"{whose} worker {rank}",
                address_of=functools.partial(context.peers.address_of, rank, peer),
                model=context.model,
                wait_timeout_s=context.options.wait_timeout_s,
                listener=None if listener is None else functools.partial(listener, rank),
                expired=functools.partial(context.stats.fail, "match", "expired"),
            )
            source.replicas += (replica,)
    except BaseException:
        source.end()
        raise
    return source


class _Followed(Inquiry):
    def __init__(self, source: FollowedSource) -> None:
        self._source = source
        self._fences = [replica.fence() for replica in source.replicas]

    def presences(self, chains: list[bytes], first: int, rank: int) -> list[Presence] | None:
        if self._source.is_resting:
            return []
        replica = self._source.replicas[rank]
        if not replica.has_passed(self._fences[rank]):
            return None
        return replica.presences(chains, first)


class AskedSource(Source):
    """A store without events that every process reaches: it is asked about each request."""

    def __init__(self, name: str, store: Store, num_workers: int, wait_timeout_s: float) -> None:
        self.name = name
        self.store = store
        self._wait_timeout_s = wait_timeout_s
        self.series: list[Series | None] = [None] * num_workers
        """The series of each worker's pages, once the worker has reported its shard."""
        self._coming = [PageIndex() for _ in range(num_workers)]
        """For each worker, the pages that it is putting."""
        self._doubted_until = 0.0

    def inquire(self) -> Inquiry:
        return _Asked(self)

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


class _Asked(Inquiry):
    """Asks about each page once, and repeatedly about pages that were coming when it last asked."""

    def __init__(self, source: AskedSource) -> None:
        self._source = source
        self._of_ranks = [_Answers() for _ in source.series]

    def presences(self, chains: list[bytes], first: int, rank: int) -> list[Presence] | None:
        source, series, answers = self._source, self._source.series[rank], self._of_ranks[rank]
        if series is None or source.is_resting:
            return []
        if not answers.take():
            return None
        found = []
        for number, chain in enumerate(chains[first:], first):
            if chain in answers.held:
                found.append(Presence.HELD)
            elif answers.must_ask(chain) and answers.ask(source, series, chains[number:], rank):
                return self.presences(chains, first, rank)
            elif source.is_coming(chain, rank):
                found.append(Presence.COMING)
            else:
                break
        return found


class _Answers:
    """A store's answers about one worker's pages."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self._ask_again_at: dict[bytes, float] = {}
        """When to ask again about pages that were absent; never, if they were not coming."""
        self._asked: list[tuple[bytes, bool]] = []
        """Chains of the open question, and whether their pages were coming then."""
        self._job: Job[Presence] | None = None

    def must_ask(self, chain: bytes) -> bool:
        """Whether the page's absence is not known, or no longer."""
        return time.monotonic() >= self._ask_again_at.get(chain, 0.0)

    def ask(self, source: AskedSource, series: Series, chains: list[bytes], rank: int) -> bool:
        """Ask about the pages that need it. Return whether the store could be asked."""
        asked = [chain for chain in chains if chain not in self.held and self.must_ask(chain)]
        coming = [source.is_coming(chain, rank) for chain in asked]
        job = source.ask(series.keys_of(asked))
        if job is not None:
            self._asked, self._job = list(zip(asked, coming, strict=True)), job
        return job is not None

    def take(self) -> bool:
        """Note the store's answer. Return whether no question is open."""
        if self._job is None:
            return True
        results = self._job.results()
        if results is None:
            return False
        again = time.monotonic() + _ASK_AGAIN_S
        for (chain, was_coming), presence in zip(self._asked, results, strict=True):
            if presence is Presence.HELD:
                self.held.add(chain)
            else:
                self._ask_again_at[chain] = again if was_coming else math.inf
        self._job = None
        return True
