"""What the store "mooncake" costs: gets and puts of pages, beside Mooncake's own client in this process.

    python benchmarks/mooncake_pages.py [--sizes 64KiB,512KiB] [--total 64MiB] [--rounds N] [--markdown FILE]

A mooncake_master of its own and one holder run on this host; pages go over TCP. "Bare" has as many threads
as the store has lanes, and puts and gets each page from and into registered memory, without checks; "and
verified" also copies each page to its place and computes its checksum. All take turns within a round, in an
order that changes, without the first. The figures are medians, the shares medians of the shares within a
round.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import harness
import xxhash

from kvplug.config.units import parse_bytes

LANES = 4
SEGMENT = 1 << 30
HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]), flush=True)
time.sleep(3600)
"""


def served(stack: ExitStack) -> str:
    """A master and a holder, until the stack ends. Returns the master's address."""
    port, metrics = harness.free_ports(2)
    where = ["--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    where += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
    harness.started(stack, [Path(sys.executable).parent / "mooncake_master", *where], port)
    holder = harness.started(stack, [sys.executable, "-c", HOLDER, f"127.0.0.1:{port}", SEGMENT])
    assert holder.stdout is not None and holder.stdout.readline() == "0\n", "there is no holder"
    return f"127.0.0.1:{port}"


class Bare:
    """Mooncake's own client in this process, with registered memory for so many pages."""

    def __init__(self, master: str, nbytes: int, count: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.client = MooncakeDistributedStore()
        assert not self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
        self.memory = mmap.mmap(-1, nbytes * count)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._nbytes = nbytes
        assert not self.client.register_buffer(self._base, nbytes * count)

    def put(self, name: str, index: int) -> None:
        assert not self.client.put_from(name, self._base + index * self._nbytes, self._nbytes)

    def get(self, name: str, index: int) -> memoryview:
        at = index * self._nbytes
        assert self.client.get_into(name, self._base + at, self._nbytes) == self._nbytes
        return memoryview(self.memory)[at : at + self._nbytes]


class Pages(harness.Pages):
    """Pages of one size, in the store and in plain values."""

    def __init__(self, stack: ExitStack, master: str, nbytes: int, total: int) -> None:
        super().__init__(nbytes, total, LANES)
        self._bare = Bare(master, nbytes, self.count)
        self._bare.memory[:] = self.rows.buffer.tobytes()
        stack.callback(self._bare.client.close)
        options = {"master": master, "prefix": f"bench{nbytes}", "lanes": LANES}
        self.store = harness.opened(stack, options, name="mooncake")
        self.keep(self.store)
        self._bare_put("kept")

    def _name(self, name: str, index: int) -> str:
        return f"bare:{self.nbytes}:{name}:{index}"

    def _bare_put(self, name: str) -> None:
        self.each(lambda index: self._bare.put(self._name(name, index), index))

    def bare_get(self, *, verified: bool) -> None:
        def work(index: int) -> None:
            page = self._bare.get(self._name("kept", index), index)
            if verified:
                self.rows.row(index)[:] = page
                xxhash.xxh3_64_digest(self.rows.row(index))

        self.each(work)

    def bare_put(self) -> Callable[[], None]:
        name = secrets.token_hex(8)
        self._bare_put(name)
        names = [self._name(name, index) for index in range(self.count)]
        return lambda: self._bare.client.batch_remove(names, True) and None


def rows_of(text: str, pages: Pages, rounds: int) -> list[list[str]]:
    calls = {
        "get": lambda: pages.get(pages.store),
        "bare get": lambda: pages.bare_get(verified=False),
        "bare get, and verified": lambda: pages.bare_get(verified=True),
        "put": lambda: pages.put(pages.store),
        "bare put": pages.bare_put,
    }
    taken = harness.in_turns(calls, rounds)
    pairs = (("get", "bare get"), ("get", "bare get, and verified"), ("put", "bare put"))
    return [[text, *harness.beside(taken, pages.total, *pair)] for pair in pairs]


def main() -> None:
    given = harness.page_parser(__doc__, "64KiB,512KiB,4MiB").parse_args()
    rows = []
    with ExitStack() as stack:
        master = served(stack)
        for text in given.sizes:
            with ExitStack() as inner:
                rows += rows_of(text, Pages(inner, master, parse_bytes(text), given.total), given.rounds)
    head = ["pages", "what", "mooncake, GB/s", "beside", "GB/s", "share", "quartiles"]
    about = f"{harness.machine()}, {LANES} lanes, {given.rounds} rounds."
    harness.write(given, harness.table(head, rows), about)


if __name__ == "__main__":
    main()
