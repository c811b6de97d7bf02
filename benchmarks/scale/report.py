"""Tables and a picture of what the model and the simulation say."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import harness

from scale import model
from scale.cluster import Topology
from scale.constants import Constants, Link
from scale.simulate import Counts, Simulation, Workload

MESH = Topology(name="full mesh")
GROUPS = Topology(name="groups of 16", group=16)
SHARED = Topology(name="one shared store", stores="shared")
SHARED_16 = Topology(name="a shared store for each 16", stores="shared", group=16)
ROUTER = Topology(name="router", group=1, routed=True)
ROUTER_GROUPS = Topology(name="router, groups of 16", group=16, routed=True)
TOPOLOGIES = (MESH, GROUPS, SHARED, SHARED_16, ROUTER, ROUTER_GROUPS)

RATES = (0.25, 1.0, 4.0)
"""Requests of an engine for each second, in the table of bends."""
SOFT_DESCRIPTORS = 1024
"""What many systems give a process that does not ask for more."""


@attrs.frozen(kw_only=True)
class Row:
    """One topology at one number of engines."""

    engines: int
    topology: Topology
    counts: Counts
    cost: model.Cost
    store_cores: float
    """Of the program that serves a shared store."""
    round_trips: float
    """For each request: fences, loads, lookups, puts."""
    router_cores: float
    busiest_bytes_per_s: float
    mean_bytes_per_s: float
    """That a store sends to other processes."""


def row(
    known: Constants, engines: int, topology: Topology, load: Workload, *, warm_s: float, seconds: float
) -> Row:
    """Simulate it, and add what the formulas say."""
    simulation = Simulation(
        engines,
        topology,
        load,
        bytes_per_s=known.load_bytes_per_s["cpu"],
        stored_pages=known.stored_pages,
        removed_per_put=known.removed_per_put,
    )
    counts = simulation.run(warm_s=warm_s, seconds=seconds)
    busiest, mean = counts.sent_bytes_per_s(load.unit_pages * load.page_bytes)
    is_own = topology.stores == "own"
    traffic = counts.traffic(engines)
    peers = topology.peers(engines)
    pages = load.store_units * load.unit_pages
    cost = model.cost(known, peers, traffic, pages=pages)
    use = counts.store_use(engines, load.unit_pages)
    store_cores = 0.0
    round_trips = cost.peers + 1 + counts.loads / counts.requests
    if not is_own:
        none = model.Traffic(requests=0, events=0, event_pages=0)
        cost = attrs.evolve(model.cost(known, 0, none, pages=0), peers=0, links=2, served=0)
        store_cores = topology.members(engines) * model.store_cores(known, use, page_bytes=load.page_bytes)
        round_trips = use.round_trips / use.lookups
    return Row(
        engines=engines,
        topology=topology,
        counts=counts,
        cost=cost,
        store_cores=store_cores,
        round_trips=round_trips,
        router_cores=_router(known, engines, counts) if topology.routed else 0.0,
        busiest_bytes_per_s=busiest,
        mean_bytes_per_s=mean,
    )


def _router(known: Constants, engines: int, counts: Counts) -> float:
    """It hears of what is stored and removed, a batch for each event."""
    each = counts.seconds * engines
    batches = (counts.events - counts.puts) / each  # what is declared is not published
    pages = (counts.event_pages - counts.pages_put) / each
    return model.router_cores(known, engines, events=batches, pages=pages)


# -- tables --------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits, or whole."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"


def _kib(link: Link) -> str:
    return f"{link.memory_bytes / 1024:.0f} KiB"


def constants_table(known: Constants) -> str:
    """What was measured."""
    links = {
        "link of a scheduler that follows a store": known.link_of_scheduler,
        "link of a worker to a follower": known.link_to_follower,
        "link of a worker that loads from a peer": known.link_to_store,
        "link of a worker that a peer loads from": known.link_to_loader,
        "link of a shared store to a process": known.link_to_client,
    }
    rows: list[tuple[str, str]] = [
        ("memory of a page in a replica", f"{known.index_page_bytes:.0f} bytes"),
        ("follow an event: processor time", _per(known.follow)),
        ("the same, without pauses", _per(known.follow_busy)),
        ("publish an event to one follower: processor time", _per(known.publish)),
        ("the same, without pauses", _per(known.publish_busy)),
        ("an event on the wire", f"{known.wire.event:.0f} bytes + {known.wire.page:.0f} a page"),
        ("pages of 2 MiB in an event that they are stored", number(known.stored_pages)),
        ("events of evicted pages for a put into a full store", number(known.removed_per_put)),
        ("fence: the engine's thread, for each replica", micro(known.fence_engine_s)),
        ("fence: the scheduler's process, with that thread", micro(known.fence_scheduler_s)),
        ("fence: the process that answers", micro(known.fence_worker_s)),
        ("fence: until all have answered, for each replica", micro(known.fence_wait_s)),
        ("connect, agree and follow: processor time of both ends", f"{known.dial_s * 1e3:.1f} ms"),
        *(
            (
                what,
                f"{link.threads:.1f} threads, {link.descriptors:.1f} descriptors, {_kib(link)}",
            )
            for what, link in links.items()
        ),
        (f"lookup of {known.lookup_pages} pages in a shared store, alone", micro(known.lookup_s)),
        ("the same: processor time of the store", micro(known.lookup_store_s)),
        ("put into a shared store: its processor time", _per(known.put_store_s)),
        ("get of a page of 2 MiB out of a shared store: its processor time", micro(known.get_store_s)),
        *(
            (f"load pages of 2 MiB: {what}", f"{rate / 1e9:.2f} GB/s")
            for what, rate in known.load_bytes_per_s.items()
        ),
        ("router: decode a batch", _per(known.router)),
        ("a batch for routers", f"{known.router_wire.event:.0f} bytes + {known.router_wire.page:.0f} a page"),
        ("a member's record", f"{known.member_bytes:.0f} bytes"),
    ]
    return harness.table(("what", "measured"), rows)


def _per(cost: Any) -> str:
    return f"{cost.event * 1e6:,.1f} µs + {cost.page * 1e6:,.2f} µs a page"


def hits_table(rows: Sequence[Row]) -> str:
    """Where the pages of prompts come from, and what moves."""
    found = []
    for each in rows:
        counts = each.counts
        of = [part / counts.units for part in (counts.cached, counts.own, counts.peer + counts.shared)]
        busy = [seconds / counts.seconds for seconds in counts.busy]
        found.append(
            (
                f"{each.engines:,}, {each.topology.name}",
                f"{counts.hit_rate:.3f}",
                *(f"{part:.3f}" for part in of),
                f"{counts.too_slow / counts.units:.3f}",
                number(each.mean_bytes_per_s / 1e6),
                number(each.busiest_bytes_per_s / 1e6),
                f"{sum(busy) / len(busy):.2f}",
                f"{max(busy):.2f}",
                f"{counts.wait_s / counts.requests * 1e3:,.0f}",
            )
        )
    head = (
        "engines, topology",
        "not computed",
        "engine's cache",
        "own store",
        "other store",
        "load too slow",
        "MB/s sent by a store",
        "busiest",
        "computing",
        "busiest engine",
        "wait, ms",
    )
    return harness.table(head, found)


def costs_table(rows: Sequence[Row]) -> str:
    """What an engine pays for that."""
    found = [
        (
            f"{each.engines:,}, {each.topology.name}",
            number(each.cost.links),
            number(each.cost.threads),
            number(each.cost.descriptors),
            number(each.cost.index_bytes / 2**20),
            number(each.cost.events_in),
            number(each.cost.cpu),
            number(each.cost.engine_s * 1e3),
            number(each.cost.wire_bytes / 1e6),
            number(each.round_trips),
            number(each.store_cores) if each.topology.stores == "shared" else "",
            number(each.router_cores) if each.topology.routed else "",
        )
        for each in rows
    ]
    head = (
        "engines, topology",
        "links",
        "threads",
        "descriptors",
        "index, MiB",
        "events/s in",
        "cores",
        "engine's thread, ms a request",
        "MB/s of events",
        "round trips a request",
        "cores of a shared store",
        "cores of a router",
    )
    return harness.table(head, found)


def traffic_at(
    rate: float, load: Workload, known: Constants, *, computed_units: float = 0.1
) -> model.Traffic:
    """Of an engine with so many requests a second, whose store is full, in a closed formula.

    ``computed_units``: that a request computes besides its new turn, on average.
    """
    prompt_pages = load.unit_pages - load.answer_pages
    pages = load.unit_pages * (1 + computed_units)
    stored = -(-(prompt_pages + load.unit_pages * computed_units) // known.stored_pages) + load.answer_pages
    puts = 1 + load.answer_pages
    events = puts * (1 + known.removed_per_put) + stored
    return model.Traffic(requests=rate, events=rate * events, event_pages=rate * 3 * pages)


def bends_table(known: Constants, load: Workload) -> str:
    """At how many engines of a full mesh each resource is used up."""
    pages = load.store_units * load.unit_pages
    one = model.cost(known, 0, traffic_at(1.0, load, known), pages=pages)
    rows: list[tuple[str, str]] = [
        (
            f"{SOFT_DESCRIPTORS:,} descriptors of a process (`ulimit -n`)",
            number(1 + model.descriptors_allow(known, SOFT_DESCRIPTORS)),
        ),
        (f"{model.MAX_SERVED:,} links that a worker serves", number(1 + model.served_allow())),
    ]
    for rate in RATES:
        traffic = traffic_at(rate, load, known)
        rows += [
            (
                f"{cores:g} core of an engine's process at {rate:g} requests/s",
                number(1 + model.most_peers(known, traffic, cores=cores)),
            )
            for cores in (0.1, 1.0)
        ]
    rows += [
        (f"{milliseconds} ms of the engine's thread a request", number(milliseconds / 1e3 / one.engine_s))
        for milliseconds in (1, 10)
    ]
    rows += [
        ("1 GiB of index", number(2**30 / one.index_bytes)),
        (
            f"{model.FENCE_LIMIT_S:g} s until all stores have answered",
            number(model.FENCE_LIMIT_S / one.fence_wait_s),
        ),
    ]
    return harness.table(("a full mesh uses up", "with so many engines"), rows)


def membership_table(known: Constants, engines: Sequence[int]) -> str:
    """Of a directory that all engines announce themselves in."""
    members = model.Membership()
    rows = [
        (
            f"{count:,}",
            number(members.announcements(count)),
            number(members.list_bytes(known, count) / 1e3),
            number(members.directory_bytes(known, count) / 1e6),
            number(model.full_dial_s(known, count)),
        )
        for count in engines
    ]
    head = (
        "engines",
        "announcements/s",
        "a list, kB",
        "lists, MB/s",
        "a full mesh connects, CPU s of all hosts",
    )
    return harness.table(head, rows)


# -- the picture ---------------------------------------------------------------------------------


def plot(file: Path, known: Constants, load: Workload, rows: Sequence[Row]) -> None:
    """Four panels: what a full mesh uses up, and what the topologies find and cost."""
    import matplotlib as mpl

    mpl.use("svg" if file.suffix == ".svg" else "agg")
    mpl.rcParams["svg.hashsalt"] = "kvplug"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    engines = [2**power for power in range(1, 11)]
    pages = load.store_units * load.unit_pages
    for rate in RATES:
        traffic = traffic_at(rate, load, known)
        costs = [model.cost(known, count - 1, traffic, pages=pages) for count in engines]
        panels[0][0].loglog(engines, [each.cpu for each in costs], label=f"{rate:g} requests/s")
        panels[0][0].axhline(1, color="grey", linewidth=0.8)
    panels[0][0].set(title="full mesh: cores of an engine's process", xlabel="engines")
    one = [model.cost(known, count - 1, traffic_at(1.0, load, known), pages=pages) for count in engines]
    for what, values in {
        "descriptors": [each.descriptors for each in one],
        "links served by a worker": [each.served for each in one],
        "threads": [each.threads for each in one],
        "index, MiB": [each.index_bytes / 2**20 for each in one],
    }.items():
        panels[0][1].loglog(engines, values, label=what)
    panels[0][1].axhline(1024, color="grey", linewidth=0.8)
    panels[0][1].set(title="full mesh: what an engine holds", xlabel="engines")
    for topology in dict.fromkeys(each.topology for each in rows):
        those = [each for each in rows if each.topology == topology]
        at = [each.engines for each in those]
        panels[1][0].semilogx(at, [each.counts.hit_rate for each in those], "o-", label=topology.name)
        cores = [
            each.cost.cpu + each.store_cores / max(1, each.topology.members(each.engines)) for each in those
        ]
        panels[1][1].loglog(at, cores, "o-", label=topology.name)
    panels[1][0].set(title="pages that were not computed again", xlabel="engines")
    panels[1][1].set(title="cores for each engine, a shared store's part too", xlabel="engines")
    for panel in panels.flat:
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    loadavg = " ".join(f"{each:.2f}" for each in os.getloadavg())
    figure.suptitle(
        f"simulated with constants of {known.where}\ndrawn {time.strftime('%-d %B %Y')} on"
        f" {platform.machine()}, {os.cpu_count()} cores, load {loadavg}",
        fontsize=8,
    )
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
