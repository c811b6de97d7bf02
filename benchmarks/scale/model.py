"""What a number of engines costs, in closed formulas. ``simulate.py`` has the hit rates; this has the rest.

An engine has one scheduler and one worker. Its scheduler follows the store of its own worker and that of each
peer; its worker serves those followers, loads from peers, and is loaded from. *Peers* are the engines that it
sees: all others in a full mesh, the rest of its group in groups, none behind a router or with a shared store.
"""

from __future__ import annotations

import attrs

from scale.constants import Constants, Link

MAX_SERVED = 1024
"""Links that a worker serves at once: ``_MAX_SERVED`` of the connector "lookup"."""
FENCE_LIMIT_S = 2.0
"""``wait_timeout_s``: how long a request waits for the stores' answers."""


@attrs.frozen(kw_only=True)
class Traffic:
    """Of one engine, for each second."""

    requests: float
    events: float
    """That each of its workers' stores makes."""
    event_pages: float
    """Pages that those events name."""


@attrs.frozen(kw_only=True)
class Cost:
    """Of one engine whose peers are as busy as itself."""

    peers: int
    links: float
    """Control channels that end here: what a worker serves, and what scheduler and workers have dialled."""
    served: float
    """The part of them that one worker serves."""
    threads: float
    descriptors: float
    index_bytes: float
    events_in: float
    """A second, at the scheduler."""
    wire_bytes: float
    """A second, in and out, of events and fences."""
    scheduler_cpu: float
    """Cores."""
    worker_cpu: float
    """Cores, of one worker."""
    engine_s: float
    """Of the engine's thread for each request."""
    fence_wait_s: float
    """Until every store has answered a request's fence, at the least."""

    @property
    def cpu(self) -> float:
        """Cores of a process that is the scheduler and its only worker, which share one interpreter lock."""
        return self.scheduler_cpu + self.worker_cpu


def cost(known: Constants, num_peers: int, traffic: Traffic, *, pages: float) -> Cost:
    """The costs of an engine with one worker, whose peers load from it and from each other.

    Args:
        pages: in each store.
    """
    seen = num_peers + 1
    links: list[tuple[float, Link]] = [
        (seen, known.link_of_scheduler),
        (seen, known.link_to_follower),
        (num_peers, known.link_to_store),
        (num_peers, known.link_to_loader),
    ]
    events, pages_named = seen * traffic.events, seen * traffic.event_pages
    fences = seen * traffic.requests
    return Cost(
        peers=num_peers,
        links=sum(count for count, _ in links),
        served=seen + num_peers,
        threads=sum(count * link.threads for count, link in links),
        descriptors=sum(count * link.descriptors for count, link in links),
        index_bytes=seen * pages * known.index_page_bytes,
        events_in=events,
        wire_bytes=2 * (known.wire.of(events, pages_named) + fences * known.fence_bytes),
        scheduler_cpu=known.follow.of(events, pages_named) + fences * known.fence_scheduler_s,
        worker_cpu=known.publish.of(events, pages_named) + fences * known.fence_worker_s,
        engine_s=seen * known.fence_engine_s,
        fence_wait_s=seen * known.fence_wait_s,
    )


def most_peers(known: Constants, traffic: Traffic, *, cores: float = 1.0) -> int:
    """So many peers keep one process, of a scheduler and its only worker, busy for so many cores."""
    of_one = cost(known, 0, traffic, pages=0)
    return max(0, int(cores / of_one.cpu) - 1)


def descriptors_allow(known: Constants, limit: int) -> int:
    """So many peers, all of which load from each other, fit into a process's limit of descriptors."""
    two = [
        cost(known, peers, Traffic(requests=0, events=0, event_pages=0), pages=0).descriptors
        for peers in (0, 1)
    ]
    return int((limit - two[0]) / (two[1] - two[0]))


def served_allow() -> int:
    """So many peers fit into the links that a worker serves: a follower of each and of its own scheduler, and
    one that loads of each."""
    return (MAX_SERVED - 1) // 2


# -- a store that all share, and a router ------------------------------------------------------


@attrs.frozen(kw_only=True)
class StoreUse:
    """Of one engine, for each second, at a store that it shares with others."""

    lookups: float
    puts: float
    pages_put: float
    pages_got: float

    @property
    def round_trips(self) -> float:
        """A lookup before a prompt and before each put; a put is agreed on and confirmed; a get is one."""
        return self.lookups + 3 * self.puts + (self.lookups if self.pages_got else 0)


def store_cores(known: Constants, use: StoreUse, *, page_bytes: int) -> float:
    """Cores that one engine's requests take of the process that serves a store "host" over pipes."""
    scale = page_bytes / (2 << 20)
    return (
        (use.lookups + use.puts) * known.lookup_store_s
        + known.put_store_s.of(use.puts, use.pages_put * scale)
        + use.pages_got * scale * known.get_store_s
    )


def router_cores(known: Constants, engines: int, *, events: float, pages: float) -> float:
    """Cores that a router in Python takes to decode what so many engines publish, and no more than decode."""
    return engines * known.router.of(events, pages)


# -- membership --------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Membership:
    """Engines that announce themselves in a directory, and read the list of all."""

    announce_s: float = 3.0
    """A fifth of the lease."""
    list_s: float = 3.0

    def announcements(self, engines: int) -> float:
        """A second, at the directory."""
        return engines / self.announce_s

    def list_bytes(self, known: Constants, engines: int) -> float:
        """Of one list."""
        return engines * known.member_bytes

    def directory_bytes(self, known: Constants, engines: int) -> float:
        """A second, that the directory sends."""
        return engines / self.list_s * self.list_bytes(known, engines)


def full_dial_s(known: Constants, engines: int) -> float:
    """Processor time of all hosts together until a full mesh of engines follows each other."""
    return engines * (engines - 1) * known.dial_s
