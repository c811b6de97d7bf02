"""What the store "host" costs: gets, puts and lookups of pages, beside a memcpy of as many bytes.

    python benchmarks/host.py [--sizes 64KiB,512KiB,2MiB] [--total 64MiB] [--rounds N] [--markdown FILE]
    python benchmarks/host.py --holds 1000,10000,100000 [--rounds N] [--markdown FILE]

The store runs in a program of its own (`kvplug store serve`), and once more in this process. "mapped" maps
the memory of that program and copies out of it; "over shm" and "over cpu" get copies over a pipe. Checksums
are on, as they are by default: every page is verified before it may be used. "memcpy" copies the same pages,
one by one, out of memory that is there already; "and hash" computes their checksums, too. "blocks over" a
pipe are as many bytes that another program sends with `send_blocks`, as blocks of 64 KiB. All take turns
within a round, in an order that changes, without the first. The figures are medians, the shares medians of
the shares within a round, with their quartiles. Lookups are of all pages in one request; their figure is
microseconds for each request.

`--holds` measures something else: how long a call for many pages holds the store's lock at a time, in stores
of so many pages. The figures are processor time of the thread that holds it, in milliseconds: the longest
hold of each round, and of these the median. Python's collector of cycles is off meanwhile, since it stops the
whole process and not only those that want the lock.
"""

from __future__ import annotations

import gc
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import harness
import torch
import xxhash

import kvplug
from kvplug.config.units import parse_bytes
from kvplug.transport import Store
from kvplug.transport.store.format import opaque_format
from kvplug_host.pages.pages import Pages as HostPages
from kvplug_host.pages.yielding_lock import YieldingLock
from kvplug_host.store import HostStore

ROUTES = {"mapped": {}, "over shm": {"transport": "shm"}, "over cpu": {"transport": "cpu"}}
BLOCK_BYTES = 64 << 10
BLOCKS_PROGRAM = """
import sys, torch, kvplug
transport, contact, layers = sys.argv[1:]
views = [torch.ones(32, 65536, dtype=torch.uint8) for _ in range(int(layers))]
with kvplug.connect_pipe(kvplug.Config(transport=transport, timeout_s=120), contact) as pipe:
    while pipe.recv_tensor() is not None:
        pipe.send_blocks(views, range(32)).wait()
"""


class SentBlocks:
    """Blocks that another program sends over a pipe whenever it is asked to."""

    def __init__(self, stack: ExitStack, transport: str, total: int) -> None:
        layers = max(1, total // (32 * BLOCK_BYTES))
        server = stack.enter_context(kvplug.listen_pipe(kvplug.Config(transport=transport), "unix:"))
        command = [sys.executable, "-c", BLOCKS_PROGRAM, transport, server.contact, layers]
        harness.started(stack, command, stderr=None)
        self._pipe = server.accept(timeout=60)
        stack.callback(lambda: self._pipe.send_tensor(None).wait(10))
        self._views = [torch.zeros(32, BLOCK_BYTES, dtype=torch.uint8) for _ in range(layers)]

    def receive(self) -> None:
        self._pipe.send_tensor(torch.zeros(1))
        self._pipe.recv_blocks(self._views, range(32), timeout=120)


class Pages(harness.Pages):
    """Pages of one size in the stores, and copies beside them."""

    def __init__(self, stack: ExitStack, nbytes: int, total: int) -> None:
        torch.empty(0)  # imported by now: the other end does not wait for that
        super().__init__(nbytes, total)
        budget = 4 * self.total + (256 << 20)
        address = f"unix:@kvplug-benchmark-{os.getpid()}-{nbytes}"
        harness.served(stack, address, budget)
        self.stores = {"in this process": harness.opened(stack, {"size": budget})}
        for name, common in ROUTES.items():
            options = {"contact": address, "map": name == "mapped"}
            store = self.stores[name] = harness.opened(stack, options, **common)
            assert ("mapped" in store.route) == (name == "mapped"), store.route
        for name, store in self.stores.items():
            self.keep(store, is_there=name.startswith("over"))
        self.pipes = {
            f"blocks over {common['transport']}": SentBlocks(stack, common["transport"], self.total)
            for common in ROUTES.values()
            if common
        }
        self._source = memoryview(bytearray(self.rows.buffer))

    def lookup(self, store: Store) -> None:
        assert set(store.submit_lookup(self.kept[store].keys).wait(120)) == {"held"}

    def copy(self, hashes: bool = False) -> None:
        for index in range(self.count):
            begin = index * self.nbytes
            page = self._source[begin : begin + self.nbytes]
            self.rows.row(index)[:] = page
            if hashes:
                xxhash.xxh3_64_digest(page)


def measure(pages: Pages, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each call in each round, by what is done."""
    beside: dict[str, Callable[[], Any]] = {
        **{name: pipe.receive for name, pipe in pages.pipes.items()},
        "memcpy": pages.copy,
        "and hash": lambda: pages.copy(hashes=True),
    }
    get, put, lookup = dict(beside), dict(beside), {}
    for name, store in pages.stores.items():
        get[name] = lambda store=store: pages.get(store)
        put[name] = lambda store=store: pages.put(store)
        if name in ("in this process", "mapped"):
            lookup[name] = lambda store=store: pages.lookup(store)
    calls = {"get": get, "put": put, "lookup": lookup}
    return {what: harness.in_turns(of, rounds) for what, of in calls.items()}


def tables(sizes: Sequence[str], total: int, rounds: int) -> list[str]:
    rows, lookups = [], []
    for text in sizes:
        with ExitStack() as stack:
            pages = Pages(stack, parse_bytes(text), total)
            taken = measure(pages, rounds)
        for what in ("get", "put"):
            times = taken[what]
            for name, each in times.items():
                speed, share = harness.gb_per_s(each, pages.total), harness.spread(times["memcpy"], each)
                others = [times["and hash"], times.get(f"blocks {name}")]
                of = [f"{harness.ratio(other, each):.2f}" if other else "" for other in others]
                rows.append([text, what, name, speed, *share, *of])
        for name, each in taken["lookup"].items():
            lookups.append([text, f"{pages.count} pages", name, f"{1e6 * statistics.median(each):,.0f}"])
    head = ["pages", "what", "how", "GB/s", "of memcpy", "quartiles"]
    return [
        harness.table([*head, "of memcpy and hash", "of the pipe's blocks"], rows),
        harness.table(["pages", "lookup of", "how", "microseconds"], lookups),
    ]


class TimedLock(YieldingLock):
    """A store's lock, and the longest that a thread has held it."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = self._began = self.longest = 0

    def __enter__(self) -> None:
        super().__enter__()
        self._depth += 1
        if self._depth == 1:
            self._began = time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.longest = max(self.longest, time.thread_time_ns() - self._began)
        super().__exit__(*_)


SLOT_BYTES = 960
_FORM = opaque_format(800)


def holds(count: int) -> dict[str, float]:
    """The longest hold of each call, in milliseconds, in a full store of about so many pages."""
    with ExitStack() as stack:
        store = harness.opened(
            stack, {"size": count * SLOT_BYTES, "segment_bytes": (count * SLOT_BYTES) >> 3}
        )
        assert isinstance(store, HostStore)
        pages = store.pages
        keys = fill(pages, [secrets.token_bytes(32) for _ in range(count)])
        more = [secrets.token_bytes(32) for _ in range(len(keys))]
        lock = pages.lock = TimedLock()
        reader, writer, other, late = object(), object(), object(), object()

        def read() -> None:
            pages.unpin(pages.pin(keys), reader)

        calls: dict[str, Callable[[], object]] = {
            "a listener gets its snapshot": lambda: pages.subscribe(lambda event: None)(),
            "the keys of a series are listed": lambda: pages.keys(b"series"),
            "all pages are looked up": lambda: pages.lookup(keys, reader),
            "all pages are looked up and leased": lambda: pages.lookup(keys, reader, 600.0),
            "a put that finds all pages leased": lambda: pages.allocate(_FORM, 1, 100),
            "the reader with these leases ends": lambda: pages.forget_holders([reader]),
            "all pages are read": read,
            "as many pages are declared": lambda: pages.declare(writer, b"series", more, 600.0),
            "the writer that has declared them ends": lambda: pages.forget_holders([writer]),
            "an end without leases ends": lambda: pages.forget_holders([other]),
            "a put once all leases have expired": lambda: pages.allocate(_FORM, 1, 100),
            "as many pages are put, each for another": lambda: fill(pages, more),
            "all pages are removed": lambda: pages.remove(None),
        }
        found = {}
        for name, call in calls.items():
            if "expired" in name:
                pages.lookup(keys, late, 0.5)
                pages.allocate(_FORM, 1, 100)
                time.sleep(0.6)
            gc.collect()
            gc.disable()
            lock.longest = 0
            call()
            gc.enable()
            found[name] = lock.longest / 1e6
        return found


def fill(pages: HostPages, keys: list[bytes]) -> list[bytes]:
    """Put pages without bytes until there is no room, or one for another. Returns those that were put."""
    for number, key in enumerate(keys):
        with pages.changing() as index:
            slot = index.reserve(900)
            if slot is None or isinstance(slot, str):
                return keys[:number]
            generation = pages.segments.next_generation()
            index.publish(key, b"series", slot, payload_bytes=800, header_bytes=100, generation=generation)
            index.log_stored(b"series", [key])
    return keys


def table_of_holds(counts: Sequence[int], rounds: int) -> str:
    found = [[holds(count) for _ in range(rounds)] for count in counts]
    rows = [
        [name, *(f"{statistics.median(each[name] for each in of_count):.3f}" for of_count in found)]
        for name in found[0][0]
    ]
    return harness.table(["call", *(f"{count:,} pages" for count in counts)], rows)


def main() -> None:
    parser = harness.page_parser(__doc__, "64KiB,512KiB,2MiB")
    parser.add_argument("--holds", help="measure how long the lock is held, in stores of so many pages")
    given = parser.parse_args()
    if given.holds:
        found = [table_of_holds([*map(int, given.holds.split(","))], given.rounds)]
    else:
        found = tables(given.sizes, given.total, given.rounds)
    harness.write(given, *found, f"{harness.machine()}, {given.rounds} rounds.")


if __name__ == "__main__":
    main()
