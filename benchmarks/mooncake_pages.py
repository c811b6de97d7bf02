"""What the store "mooncake" costs: gets and puts of pages, beside Mooncake's own client in this process.

    python benchmarks/mooncake_pages.py [--sizes 64KiB,512KiB] [--total 64MiB] [--rounds N] [--markdown FILE]

A mooncake_master of its own and one holder run on this host; pages go over TCP. "Bare" has as many threads
as the store has lanes, and puts and gets each page from and into registered memory, without checks; "and
verified" also copies each page to its place and computes its checksum. All take turns within a round, in an
order that changes, without the first. The figures are medians, the shares medians of the shares within a
round.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xxhash
from fs import add_outputs, cells, in_turns, machine, size, write
from host import opened

from kvplug.transport import PageBuffers, PageRequest, Series
from kvplug.transport.store.format import opaque_format
from kvplug.transport.store.keys import foreign_key

LANES = 4
SEGMENT = 1 << 30
HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]), flush=True)
time.sleep(3600)
"""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def served(stack: ExitStack) -> str:
    """A master and a holder, until the stack ends. Returns the master's address."""
    master = f"127.0.0.1:{free_port()}"
    where = ["--rpc_address=127.0.0.1", f"--rpc_port={master.rpartition(':')[2]}"]
    where += ["--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
    program = Path(sys.executable).parent / "mooncake_master"
    started(stack, [str(program), *where])
    while True:
        with socket.socket() as client:
            if not client.connect_ex(("127.0.0.1", int(master.rpartition(":")[2]))):
                break
        time.sleep(0.02)
    holder = started(stack, [sys.executable, "-c", HOLDER, master, str(SEGMENT)])
    assert holder.stdout is not None and holder.stdout.readline() == b"0\n", "there is no holder"
    return master


def started(stack: ExitStack, command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


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


class Pages:
    """Pages of one size, in the store and in plain values."""

    def __init__(self, stack: ExitStack, master: str, nbytes: int, total: int) -> None:
        self.count = max(LANES, total // nbytes)
        self.total = self.count * nbytes
        self._nbytes = nbytes
        self._memory = PageBuffers.empty(opaque_format(nbytes), self.count)
        self._memory.rows().buffer[:] = secrets.token_bytes(1 << 10) * (self.total >> 10)
        self._pool = stack.enter_context(ThreadPoolExecutor(LANES))
        self._bare = Bare(master, nbytes, self.count)
        self._bare.memory[:] = self._memory.rows().buffer.tobytes()
        stack.callback(self._bare.client.close)
        options = {"master": master, "prefix": f"bench{nbytes}", "lanes": LANES}
        self._store = opened(stack, options, name="mooncake")
        self._series = Series(opaque_format(nbytes), b"", self._store.seal.id)
        self._kept = self._request(b"kept")
        assert not any(self._store.submit_put(self._kept).wait(100)), "a page was not kept"
        self._bare_put("kept")

    def _request(self, name: bytes) -> PageRequest:
        identities = [name + b" %d" % index for index in range(self.count)]
        keys = [foreign_key(b"benchmark", identity) for identity in identities]
        return PageRequest(series=self._series, keys=keys, identities=identities, memory=self._memory)

    def _each(self, work: Callable[[int], None]) -> None:
        for done in [self._pool.submit(work, index) for index in range(self.count)]:
            done.result()

    def _name(self, name: str, index: int) -> str:
        return f"bare:{self._nbytes}:{name}:{index}"

    def _bare_put(self, name: str) -> None:
        self._each(lambda index: self._bare.put(self._name(name, index), index))

    def get(self) -> None:
        assert not any(self._store.submit_get(self._kept).wait(100)), "a page was missed"

    def bare_get(self, *, verified: bool) -> None:
        rows = self._memory.rows()

        def work(index: int) -> None:
            page = self._bare.get(self._name("kept", index), index)
            if verified:
                rows.row(index)[:] = page
                xxhash.xxh3_64_digest(rows.row(index))

        self._each(work)

    def put(self) -> Callable[[], None]:
        pages = self._request(secrets.token_bytes(8).hex().encode())
        assert not any(self._store.submit_put(pages).wait(100)), "a page was not kept"
        return lambda: self._store.submit_remove(pages.keys).wait(100) and None

    def bare_put(self) -> Callable[[], None]:
        name = secrets.token_bytes(8).hex()
        self._bare_put(name)
        names = [self._name(name, index) for index in range(self.count)]
        return lambda: self._bare.client.batch_remove(names, True) and None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="64KiB,512KiB,4MiB")
    parser.add_argument("--total", type=size, default=64 << 20, help="bytes that are moved at once")
    parser.add_argument("--rounds", type=int, default=9)
    add_outputs(parser)
    given = parser.parse_args()
    lines = ["| pages | what | mooncake, GB/s | beside | GB/s | share | quartiles |", "| --- " * 7 + "|"]
    with ExitStack() as stack:
        master = served(stack)
        for text in given.sizes.split(","):
            with ExitStack() as inner:
                pages = Pages(inner, master, size(text), given.total)
                lines += rows_of(text, pages, given.rounds)
            print(*lines[-3:], sep="\n", file=sys.stderr)
    text = "\n".join(lines) + f"\n\n{machine(Path(tempfile.gettempdir()), LANES)}, {given.rounds} rounds.\n"
    write(given, text)
    return 0


def rows_of(text: str, pages: Pages, rounds: int) -> list[str]:
    calls: dict[str, Callable[[], Any]] = {
        "get": pages.get,
        "bare get": lambda: pages.bare_get(verified=False),
        "bare get, and verified": lambda: pages.bare_get(verified=True),
        "put": pages.put,
        "bare put": pages.bare_put,
    }
    taken = in_turns(calls, rounds)
    lines = []
    for what, beside in (("get", "bare get"), ("get", "bare get, and verified"), ("put", "bare put")):
        lines.append(f"| {text} | {cells(taken, pages.total, what, beside)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
