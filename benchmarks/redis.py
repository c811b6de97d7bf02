"""What the store "redis" costs: gets and puts of pages, beside valkey-py with values of the same sizes.

    python benchmarks/redis.py [--sizes 64KiB,2MiB] [--total 32MiB] [--rounds N] [--markdown FILE]

A redis-server (or valkey-server) of its own runs on this host, without files. "Bare" has as many connections
as the store, and gets and sets each page in values of at most 1 MiB, without checks; "pipelined" sends the
commands of up to 8 MiB of pages at once; "and verified" also copies each page to its place and computes its
checksum. All take turns within a round, in an order that changes, without the first. The figures are medians,
the shares medians of the shares within a round. The last table counts how often the store sends over one
connection, and waits for an answer.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import harness
import valkey
import xxhash

from kvplug.config.units import parse_bytes
from kvplug_redis.replies import ReplyConnection

PIECE = 1 << 20
BATCH = 8 << 20
CONNECTIONS = 4


def served(stack: ExitStack, folder: str) -> int:
    """A server, until the stack ends. Returns its port; its socket is in the folder."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    assert program is not None, "there is no redis-server: apt-get install redis-server"
    (port,) = harness.free_ports(1)
    command = [program, "--port", port, "--bind", "127.0.0.1", "--unixsocket", f"{folder}/socket"]
    harness.started(stack, [*command, "--save", "", "--dir", folder], port, stdout=subprocess.DEVNULL)
    return port


class Pages(harness.Pages):
    """Pages of one size, in the store and in plain values."""

    def __init__(self, stack: ExitStack, port: int, path: str, nbytes: int, total: int) -> None:
        super().__init__(nbytes, total, CONNECTIONS)
        self._bare: dict[str, Any] = {}
        self.stores: dict[str, Any] = {}
        for where, address, given in (
            ("Unix socket", f"unix:{path}", {"unix_socket_path": path}),
            ("TCP", f"127.0.0.1:{port}", {"host": "127.0.0.1", "port": port}),
        ):
            self._bare[where] = valkey.Valkey(**given)
            options = {"address": [address], "prefix": f"bench{nbytes}"}
            self.stores[where] = harness.opened(stack, options, name="redis")
            self.keep(self.stores[where], is_there=where == "TCP")
        self._set("Unix socket", b"kept")

    def _pipelined(
        self, where: str, work: Callable[[Any, int], None], use: Callable[[int, Any], None]
    ) -> None:
        """Each connection sends its share of the pages, at most 8 MiB with one round trip."""
        client = self._bare[where]
        per_call = max(1, min(-(-self.count // CONNECTIONS), BATCH // self.nbytes))

        def call(begin: int) -> None:
            pages = range(begin, min(begin + per_call, self.count))
            pipe = client.pipeline(transaction=False)
            for index in pages:
                work(pipe, index)
            values = pipe.execute()
            each = len(values) // len(pages)
            for at, index in enumerate(pages):
                use(index, values[at * each : at * each + each])

        self.each(call, range(0, self.count, per_call))

    def _names(self, name: bytes, index: int) -> list[tuple[bytes, int, int]]:
        begins = range(0, self.nbytes, PIECE)
        return [
            (b"bare:%d:%s:%d:%d" % (self.nbytes, name, index, at), at, min(at + PIECE, self.nbytes))
            for at in begins
        ]

    def _set(self, where: str, name: bytes) -> None:
        client, rows = self._bare[where], self.rows

        def work(index: int) -> None:
            for key, begin, end in self._names(name, index):
                client.set(key, rows.row(index)[begin:end])

        self.each(work)

    def bare_get(self, where: str, *, verified: bool) -> None:
        client, rows = self._bare[where], self.rows

        def work(index: int) -> None:
            for key, begin, end in self._names(b"kept", index):
                value = client.get(key)
                if verified:
                    rows.row(index)[begin:end] = value
            if verified:
                xxhash.xxh3_64_digest(rows.row(index))

        self.each(work)

    def pipelined_get(self, where: str, *, verified: bool) -> None:
        rows = self.rows

        def get(pipe: Any, index: int) -> None:
            for key, _, _ in self._names(b"kept", index):
                pipe.get(key)

        def use(index: int, values: Any) -> None:
            if verified:
                for (_, begin, end), value in zip(self._names(b"kept", index), values, strict=True):
                    rows.row(index)[begin:end] = value
                xxhash.xxh3_64_digest(rows.row(index))

        self._pipelined(where, get, use)

    def pipelined_set(self, where: str) -> Callable[[], None]:
        name, rows = secrets.token_hex(8).encode(), self.rows

        def put(pipe: Any, index: int) -> None:
            for key, begin, end in self._names(name, index):
                pipe.set(key, rows.row(index)[begin:end])

        self._pipelined(where, put, lambda index, values: None)
        return self._cleared(where, name)

    def bare_set(self, where: str) -> Callable[[], None]:
        name = secrets.token_hex(8).encode()
        self._set(where, name)
        return self._cleared(where, name)

    def _cleared(self, where: str, name: bytes) -> Callable[[], None]:
        names = [key for index in range(self.count) for key, _, _ in self._names(name, index)]
        return lambda: self._bare[where].unlink(*names) and None


def round_trips(stack: ExitStack, port: int, text: str) -> tuple[object, ...]:
    """A row: how often the store sends and waits for all pages that it moves at once over one connection, at
    most :data:`BATCH` bytes.
    """
    nbytes, sent, send = parse_bytes(text), [0], ReplyConnection.send_packed_command
    count = min(8, BATCH // nbytes)
    options = {"address": [f"127.0.0.1:{port}"], "prefix": f"trips{nbytes}", "connections": 1}
    store = harness.opened(stack, options, name="redis")
    pages = harness.Pages(nbytes, count * nbytes)
    store.submit_lookup(pages.request(store, b"kept").keys).wait(100)  # connects

    def counted(connection: ReplyConnection, *given: Any, **more: Any) -> Any:
        sent[0] += 1
        return send(connection, *given, **more)

    ReplyConnection.send_packed_command = counted
    try:
        pages.keep(store)
        put, sent[0] = sent[0], 0
        pages.get(store)
    finally:
        ReplyConnection.send_packed_command = send
    return f"{count} of {text}", put, sent[0], 2


def rows_of(text: str, pages: Pages, rounds: int) -> list[list[str]]:
    rows = []
    for where, store in pages.stores.items():
        calls: dict[str, Callable[[], Any]] = {
            "get": lambda store=store: pages.get(store),
            "bare get": lambda where=where: pages.bare_get(where, verified=False),
            "bare get, and verified": lambda where=where: pages.bare_get(where, verified=True),
            "pipelined get": lambda where=where: pages.pipelined_get(where, verified=False),
            "pipelined get, and verified": lambda where=where: pages.pipelined_get(where, verified=True),
            "put": lambda store=store: pages.put(store),
            "bare set": lambda where=where: pages.bare_set(where),
            "pipelined set": lambda where=where: pages.pipelined_set(where),
        }
        taken = harness.in_turns(calls, rounds)
        for other in calls:
            if other not in ("get", "put"):
                what = "get" if "get" in other else "put"
                rows.append([text, where, *harness.beside(taken, pages.total, what, other)])
    return rows


def main() -> None:
    given = harness.page_parser(__doc__, "64KiB,2MiB", "32MiB").parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplug-"))
        port, rows = served(stack, folder), []
        for text in given.sizes:
            pages = Pages(stack, port, f"{folder}/socket", parse_bytes(text), given.total)
            rows += rows_of(text, pages, given.rounds)
        trips = [round_trips(stack, port, text) for text in given.sizes]
    head = ["pages", "over", "what", "redis, GB/s", "beside", "GB/s", "share", "quartiles"]
    about = f"{harness.machine()}, {CONNECTIONS} connections, {given.rounds} rounds."
    of_trips = harness.table(["pages", "round trips of a put", "of a get", "goal"], trips)
    harness.write(given, harness.table(head, rows), of_trips, about)


if __name__ == "__main__":
    main()
