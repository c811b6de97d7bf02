"""Measures the constants of the model, with kvplug's own code in processes of their own, in about three
minutes."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import harness
import msgspec

import kvplug
from kvplug.assembly.members import Announcement
from kvplug.engine import CacheEvent
from kvplug.net.wire import values
from kvplug.net.wire.frames import HEADER_SIZE
from kvplug.transport import PageBuffers, PageEvent, PageRequest, Series, Store
from kvplug.transport.store.format import opaque_format
from kvplug_lookup.connector.publisher import encode_batch
from kvplug_testing import peers
from scale.children import CHILDREN, PAGE_TOKENS
from scale.constants import Constants, Link, PerEvent

NUM_LINKS = 32
FEW, MANY = 1, 64
"""Pages that an event names."""
CYCLES, BUSY_CYCLES, SECONDS = 60, 600, 4.0
LOOKUP_PAGES = 128
PUT_PAGES = 16


def environment() -> dict[str, str]:
    """Of engines that share a secret, and find this package."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "KVPLUG_SECRET": os.environ.get("KVPLUG_SECRET") or secrets.token_hex(32),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def where() -> str:
    """The date, the machine and the versions."""
    return f"{time.strftime('%-d %B %Y')}, {harness.machine()}, load {os.getloadavg()[0]:.1f} before"


# -- links and events --------------------------------------------------------------------------


def _difference(after: list[float], before: list[float], count: int) -> Link:
    threads, descriptors, memory = ((a - b) / count for a, b in zip(after[:3], before[:3], strict=True))
    return Link(threads=threads, descriptors=descriptors, memory_bytes=max(0.0, memory))


def _ask(child: peers.Peer, *message: Any) -> list[float]:
    child.send(list(message))
    answer: list[float] = child.recv(120)
    return answer


def links_and_events() -> dict[str, Any]:
    """One engine saves; another follows it once, and then 32 times more."""
    saving_port, following_port = harness.free_ports(2)
    env = environment()
    with ExitStack() as stack:
        saves = stack.enter_context(peers.start(f"{CHILDREN}:saving", saving_port, timeout_s=300, env=env))
        saves.recv(60)
        follows = stack.enter_context(
            peers.start(f"{CHILDREN}:following", following_port, saving_port, timeout_s=300, env=env)
        )
        follows.recv(60)
        _ask(saves, "events", 5, MANY, 0.5)  # warms up
        alone = _runs(saves, follows)
        before = _ask(saves, "taken"), _ask(follows, "taken")
        _ask(follows, "follow", NUM_LINKS)
        time.sleep(0.5)
        after = _ask(saves, "taken"), _ask(follows, "taken")
        dial_s = sum(a[3] - b[3] for a, b in zip(after, before, strict=True)) / NUM_LINKS
        followed = _runs(saves, follows)
        fences = _fences(saves, follows)
        loaded_before = _ask(saves, "taken"), _ask(follows, "taken")
        _ask(follows, "load", NUM_LINKS)
        loaded_after = _ask(saves, "taken"), _ask(follows, "taken")
        for child in (follows, saves):
            child.send(["end"])
            child.result(60)
    costs: dict[str, PerEvent] = {}
    for cycles, suffix in ((CYCLES, ""), (BUSY_CYCLES, "_busy")):
        for at, what in enumerate(("publish", "follow")):
            few, many = (
                (followed[cycles, keys][at] - alone[cycles, keys][at]) / NUM_LINKS for keys in (FEW, MANY)
            )
            costs[what + suffix] = _per_event(few, many)
    return {
        **costs,
        "dial_s": dial_s,
        "link_to_follower": _difference(after[0], before[0], NUM_LINKS),
        "link_of_scheduler": _difference(after[1], before[1], NUM_LINKS),
        "link_to_loader": _difference(loaded_after[0], loaded_before[0], NUM_LINKS),
        "link_to_store": _difference(loaded_after[1], loaded_before[1], NUM_LINKS),
        **fences,
    }


def _per_event(few: float, many: float) -> PerEvent:
    page = max(0.0, (many - few) / (MANY - FEW))
    return PerEvent(event=few - page * FEW, page=page)


def _runs(saves: peers.Peer, follows: peers.Peer) -> dict[tuple[int, int], tuple[float, float]]:
    """Processor time of an event, at the end that publishes it and at the one that follows, by the number of
    cycles and of keys: medians of three."""
    taken: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for _ in range(3):
        for cycles in (CYCLES, BUSY_CYCLES):
            for keys in (FEW, MANY):
                begin, other = _ask(saves, "taken"), _ask(follows, "taken")
                *end, events = _ask(saves, "events", cycles, keys, SECONDS)
                time.sleep(0.5)
                used = (end[3] - begin[3]) / events, (_ask(follows, "taken")[3] - other[3]) / events
                taken.setdefault((cycles, keys), []).append(used)
    return {
        which: (statistics.median(a for a, _ in found), statistics.median(b for _, b in found))
        for which, found in taken.items()
    }


def _fences(saves: peers.Peer, follows: peers.Peer) -> dict[str, Any]:
    rounds, by_count = 200, {}
    for count in (1, NUM_LINKS):
        before = _ask(saves, "taken")
        engine, answered, used = _ask(follows, "fence", count, rounds)
        by_count[count] = (engine, answered, used, (_ask(saves, "taken")[3] - before[3]) / rounds)
    engine, answered, used, served = (
        (many - one) / (NUM_LINKS - 1) for one, many in zip(by_count[1], by_count[NUM_LINKS], strict=True)
    )
    nbytes = sum(HEADER_SIZE + len(values.encode({name: 1 << 20})) for name in ("ping", "pong"))
    return {
        "fence_engine_s": engine,
        "fence_wait_s": answered,
        "fence_scheduler_s": used,
        "fence_worker_s": served,
        "fence_bytes": nbytes,
    }


def wire() -> PerEvent:
    """Bytes of stored and removed pages on a channel."""

    def nbytes(count: int) -> float:
        log = PageEvent.Log()
        keys = [secrets.token_bytes(32) for _ in range(count)]
        events = [
            log.declared(bytes(16), keys, 2.0),
            log.stored(bytes(16), keys),
            log.removed(bytes(16), keys, PageEvent.Removal.EVICTED),
        ]
        return sum(HEADER_SIZE + len(values.encode(each.to_plain())) for each in events) / len(events)

    return _per_event(nbytes(FEW), nbytes(MANY))


def router() -> dict[str, PerEvent]:
    """What the published form of an event is, and takes to decode."""
    seconds, sizes = {}, {}
    for count in (FEW, MANY):
        batch = encode_batch(
            [
                CacheEvent(
                    kind="stored",
                    block_hashes=(secrets.token_bytes(32),),
                    token_ids=tuple(range(100_000, 100_000 + PAGE_TOKENS)),
                    block_size=PAGE_TOKENS,
                    parent_hash=secrets.token_bytes(32),
                    medium="CPU",
                    owner="host",
                    adapter="",
                    chains=(secrets.token_bytes(32),),
                )
                for _ in range(count)
            ]
        )
        sizes[count] = float(len(batch))
        began = time.process_time()
        for _ in range(5000):
            msgspec.msgpack.decode(batch)
        seconds[count] = (time.process_time() - began) / 5000
    return {
        "router": _per_event(seconds[FEW], seconds[MANY]),
        "router_wire": _per_event(sizes[FEW], sizes[MANY]),
    }


def index_bytes() -> float:
    """Resident bytes of a page in a replica's index, among 500,000 of them."""
    with peers.start(f"{__file__}:indexing", 500_000, timeout_s=120, env=environment()) as child:
        found: float = child.result(120)
        return found


def indexing(parent: peers.Parent, count: int) -> float:
    from kvplug_lookup.connector.page_index import PageIndex
    from scale.children import taken

    index, log, series = PageIndex(), PageEvent.Log(), Series(opaque_format(1 << 10))
    before = taken()[2]
    for _ in range(0, count, 16):
        event = log.stored(series.id, [secrets.token_bytes(32) for _ in range(16)])
        message = values.decode(values.encode(event.to_plain()))
        index.apply(PageEvent.from_plain(message), series)
    assert len(index) == count
    return (taken()[2] - before) / count


def events_of_put() -> dict[str, float]:
    """Events of a put of 16 pages of 2 MiB into a full store "host", as an engine makes it."""
    given = {"stores": ["host"], "options": {"host": {"size": "256 MiB"}}}
    store = kvplug.build_store(kvplug.Config.from_dict(given))
    heard: list[str] = []
    try:
        series = harness.series(store, opaque_format(2 << 20))
        for number in range(20):
            if number == 10:
                end = store.subscribe(lambda event: heard.append(type(event).__name__))
                heard.clear()
            memory = store.allocate(series, PUT_PAGES)
            assert memory is not None
            put = harness.request(series, memory, b"%d" % number, PUT_PAGES)
            store.declare(series, put.keys, timeout=60)
            harness.put(store, put)
        end()
        return {what: heard.count(f"Pages{what.title()}") / 10 for what in ("declared", "stored", "removed")}
    finally:
        store.abort()


def _put(store: Store, nbytes: int, name: bytes, count: int) -> PageRequest:
    series = harness.series(store, opaque_format(nbytes))
    put = harness.request(series, PageBuffers.empty(series.format, count), name, count)
    harness.put(store, put)
    return put


# -- a store that all engines share ------------------------------------------------------------


def served(stack: ExitStack) -> tuple[str, int]:
    """A program that serves a store "host": its address and process id."""
    os.environ.update(environment())
    address = f"127.0.0.1:{harness.free_ports(1)[0]}"
    return address, harness.served(stack, address, 1 << 29)


def _opened(stack: ExitStack, address: str, *, is_mapped: bool = False, transport: str = "cpu") -> Store:
    return harness.opened(stack, {"contact": address, "map": is_mapped}, transport=transport)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _taken(pid: int) -> list[float]:
    here = peers.Resources.of(pid)
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return [float(len(here.threads)), float(len(here.descriptors)), float(resident)]


def shared_store() -> dict[str, Any]:
    """Lookups, puts, gets and clients of a store that another program serves."""
    import torch

    torch.empty(0)
    with ExitStack() as stack:
        address, pid = served(stack)
        store = _opened(stack, address)
        keys = _put(store, 64 << 10, b"known", LOOKUP_PAGES).keys
        alone = [harness.seconds(lambda: store.submit_lookup(keys).wait())[0] for _ in range(300)]
        before, rounds = _cpu(pid), 3000
        for _ in range(rounds // 8):
            for job in [store.submit_lookup(keys) for _ in range(8)]:
                job.wait()
        lookup_cpu = (_cpu(pid) - before) / rounds
        for number in range(20):  # until it is full: from then on pages go, and no memory is new
            _put(store, 2 << 20, b"first %d" % number, 16)
        keys = _put(store, 64 << 10, b"known again", LOOKUP_PAGES).keys
        puts, rounds = {}, 60
        for count in (1, 16):
            before = _cpu(pid)
            for number in range(rounds):
                _put(store, 2 << 20, b"put %d %d" % (count, number), count)
            puts[count] = (_cpu(pid) - before) / rounds
        page_s = max(0.0, (puts[16] - puts[1]) / 15)
        before_links = _taken(pid)
        for _ in range(16):
            _opened(stack, address).submit_lookup(keys).wait()
        link = _difference(_taken(pid), before_links, 16)
    return {
        "lookup_pages": LOOKUP_PAGES,
        "lookup_s": statistics.median(alone),
        "lookup_store_s": lookup_cpu,
        "put_store_s": PerEvent(event=puts[1] - page_s, page=page_s),
        "link_to_client": link,
    }


def loads() -> dict[str, Any]:
    """Pages of 2 MiB out of a store that another program serves."""
    rates, get_s = {}, 0.0
    with ExitStack() as stack:
        address, pid = served(stack)
        kept = _put(_opened(stack, address), 2 << 20, b"large", 32)
        for name, is_mapped, transport in (
            ("mapped", True, "cpu"),
            ("shm", False, "shm"),
            ("cpu", False, "cpu"),
        ):
            other = _opened(stack, address, is_mapped=is_mapped, transport=transport)
            assert ("mapped" if is_mapped else "pipe") in other.route, other.route
            rates[name], get_s = _loaded(other, kept, pid)
    return {"get_store_s": get_s, "load_bytes_per_s": rates}


def _loaded(store: Store, get: PageRequest, pid: int) -> tuple[float, float]:
    """Bytes a second, and seconds of the store's processor time a page."""
    taken, before, warm, rounds = [], 0.0, 3, 30
    for number in range(warm + rounds):
        if number == warm:
            before = _cpu(pid)
        taken.append(harness.seconds(lambda: harness.get(store, get))[0])
    count = len(get.keys)
    nbytes = count * get.series.format.nbytes
    return nbytes / statistics.median(taken[warm:]), (_cpu(pid) - before) / rounds / count


def member_bytes() -> float:
    """An announcement with a proof, and the name that it is kept under."""
    about = Announcement(
        engine_id="0" * 32,
        epoch="0" * 32,
        rank=0,
        num_workers=1,
        contact="10.123.45.67:29555",
        role="both",
        model="0" * 16,
    )
    return len(about.name) + len(about.to_bytes(b"a key"))


def measured(tell: Any = print) -> Constants:
    """All of it."""
    found: dict[str, Any] = {"where": where(), "wire": wire(), "member_bytes": member_bytes(), **router()}
    for what, part in (
        ("links and events", links_and_events),
        ("a shared store", shared_store),
        ("loads", loads),
    ):
        tell(f"measuring {what}")
        found |= part()
    tell("measuring an index")
    found["index_page_bytes"] = index_bytes()
    events = events_of_put()
    assert events["declared"] == 1, events
    found |= {"stored_pages": PUT_PAGES / events["stored"], "removed_per_put": events["removed"]}
    return Constants(**{field.name: found[field.name] for field in attrs.fields(Constants)})
