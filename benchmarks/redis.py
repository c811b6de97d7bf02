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

import argparse
import secrets
import shutil
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

import valkey
import xxhash
from fs import add_outputs, cells, in_turns, machine, size, write
from host import opened

from kvplug.transport import PageBuffers, PageRequest, Series
from kvplug.transport.store.format import opaque_format
from kvplug.transport.store.keys import foreign_key
from kvplug_redis.replies import ReplyConnection

PIECE = 1 << 20
BATCH = 8 << 20
CONNECTIONS = 4


def served(stack: ExitStack, folder: str) -> int:
    """A server, until the stack ends. Returns its port; its socket is in the folder."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    assert program is not None, "there is no redis-server: apt-get install redis-server"
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = int(bound.getsockname()[1])
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", f"{folder}/socket"]
    server = subprocess.Popen([*command, "--save", "", "--dir", folder], stdout=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    while True:
        with socket.socket() as client:
            if not client.connect_ex(("127.0.0.1", port)):
                return port
        time.sleep(0.02)


class Pages:
    """Pages of one size, in the store and in plain values."""

    def __init__(self, stack: ExitStack, port: int, path: str, nbytes: int, total: int) -> None:
        self.count = max(CONNECTIONS, total // nbytes)
        self.total = self.count * nbytes
        self._nbytes = nbytes
        self._memory = PageBuffers.empty(opaque_format(nbytes), self.count)
        self._memory.rows().buffer[:] = secrets.token_bytes(1 << 10) * (self.total >> 10)
        self._pool = stack.enter_context(ThreadPoolExecutor(CONNECTIONS))
        self._bare: dict[str, Any] = {}
        self._stores: dict[str, Any] = {}
        for where, address, given in (
            ("Unix socket", f"unix:{path}", {"unix_socket_path": path}),
            ("TCP", f"127.0.0.1:{port}", {"host": "127.0.0.1", "port": port}),
        ):
            self._bare[where] = valkey.Valkey(**given)
            self._stores[where] = opened(
                stack, {"address": [address], "prefix": f"bench{nbytes}"}, name="redis"
            )
        store = next(iter(self._stores.values()))
        self._series = Series(opaque_format(nbytes), b"", store.seal.id)
        self._kept = self._request(b"kept")
        assert not any(store.submit_put(self._kept).wait(100)), "a page was not kept"
        self._set("Unix socket", b"kept")

    def _request(self, name: bytes) -> PageRequest:
        identities = [name + b" %d" % index for index in range(self.count)]
        keys = [foreign_key(b"benchmark", identity) for identity in identities]
        return PageRequest(series=self._series, keys=keys, identities=identities, memory=self._memory)

    def _pipelined(
        self, where: str, work: Callable[[Any, int], None], use: Callable[[int, Any], None]
    ) -> None:
        """Each connection sends its share of the pages, at most 8 MiB with one round trip."""
        client = self._bare[where]
        per_call = max(1, min(-(-self.count // CONNECTIONS), BATCH // self._nbytes))

        def call(begin: int) -> None:
            pages = range(begin, min(begin + per_call, self.count))
            pipe = client.pipeline(transaction=False)
            for index in pages:
                work(pipe, index)
            values = pipe.execute()
            each = len(values) // len(pages)
            for at, index in enumerate(pages):
                use(index, values[at * each : at * each + each])

        for done in [self._pool.submit(call, begin) for begin in range(0, self.count, per_call)]:
            done.result()

    def _each(self, work: Callable[[int], None]) -> None:
        for done in [self._pool.submit(work, index) for index in range(self.count)]:
            done.result()

    def _names(self, name: bytes, index: int) -> list[tuple[bytes, int, int]]:
        begins = range(0, self._nbytes, PIECE)
        return [
            (b"bare:%d:%s:%d:%d" % (self._nbytes, name, index, at), at, min(at + PIECE, self._nbytes))
            for at in begins
        ]

    def _set(self, where: str, name: bytes) -> None:
        client, rows = self._bare[where], self._memory.rows()

        def work(index: int) -> None:
            for key, begin, end in self._names(name, index):
                client.set(key, rows.row(index)[begin:end])

        self._each(work)

    def get(self, where: str) -> None:
        assert not any(self._stores[where].submit_get(self._kept).wait(100)), "a page was missed"

    def bare_get(self, where: str, *, verified: bool) -> None:
        client, rows = self._bare[where], self._memory.rows()

        def work(index: int) -> None:
            for key, begin, end in self._names(b"kept", index):
                value = client.get(key)
                if verified:
                    rows.row(index)[begin:end] = value
            if verified:
                xxhash.xxh3_64_digest(rows.row(index))

        self._each(work)

    def pipelined_get(self, where: str, *, verified: bool) -> None:
        rows = self._memory.rows()

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
        name, rows = secrets.token_bytes(8).hex().encode(), self._memory.rows()

        def put(pipe: Any, index: int) -> None:
            for key, begin, end in self._names(name, index):
                pipe.set(key, rows.row(index)[begin:end])

        self._pipelined(where, put, lambda index, values: None)
        return self._cleared(where, name)

    def put(self, where: str) -> Callable[[], None]:
        pages, store = self._request(secrets.token_bytes(8).hex().encode()), self._stores[where]
        assert not any(store.submit_put(pages).wait(100)), "a page was not kept"
        return lambda: store.submit_remove(pages.keys).wait(100) and None

    def bare_set(self, where: str) -> Callable[[], None]:
        name = secrets.token_bytes(8).hex().encode()
        self._set(where, name)
        return self._cleared(where, name)

    def _cleared(self, where: str, name: bytes) -> Callable[[], None]:
        names = [key for index in range(self.count) for key, _, _ in self._names(name, index)]
        return lambda: self._bare[where].unlink(*names) and None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="64KiB,2MiB")
    parser.add_argument("--total", type=size, default=32 << 20, help="bytes that are moved at once")
    parser.add_argument("--rounds", type=int, default=9)
    add_outputs(parser)
    given = parser.parse_args()
    lines = ["| pages | over | what | redis, GB/s | beside | GB/s | share | quartiles |", "| --- " * 8 + "|"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplug-"))
        port = served(stack, folder)
        for text in given.sizes.split(","):
            pages = Pages(stack, port, f"{folder}/socket", size(text), given.total)
            lines += rows_of(text, pages, given.rounds)
        lines += ["", "| pages | round trips of a put | of a get | goal |", "| --- " * 4 + "|"]
        lines += [round_trips(stack, port, text) for text in given.sizes.split(",")]
    lines += ["", f"{machine(Path(tempfile.gettempdir()), CONNECTIONS)}, {given.rounds} rounds."]
    write(given, "\n".join(lines))
    return 0


def round_trips(stack: ExitStack, port: int, text: str) -> str:
    """A row: how often the store sends and waits for all pages that it moves at once over one connection, at
    most :data:`BATCH` bytes.
    """
    nbytes, sent, send = size(text), [0], ReplyConnection.send_packed_command
    count = min(8, BATCH // nbytes)
    options = {"address": [f"127.0.0.1:{port}"], "prefix": f"trips{nbytes}", "connections": 1}
    store = opened(stack, options, name="redis")
    names = [b"%d" % index for index in range(count)]
    pages = PageRequest(
        series=Series(opaque_format(nbytes), b"", store.seal.id),
        keys=[foreign_key(b"benchmark", name) for name in names],
        identities=names,
        memory=PageBuffers.empty(opaque_format(nbytes), count),
    )
    store.submit_lookup(pages.keys).wait(100)  # connects

    def counted(connection: ReplyConnection, *given: Any, **more: Any) -> Any:
        sent[0] += 1
        return send(connection, *given, **more)

    ReplyConnection.send_packed_command = counted
    try:
        assert not any(store.submit_put(pages).wait(100)), "a page was not kept"
        put, sent[0] = sent[0], 0
        assert not any(store.submit_get(pages).wait(100)), "a page was missed"
    finally:
        ReplyConnection.send_packed_command = send
    return f"| {count} of {text} | {put} | {sent[0]} | 2 |"


def rows_of(text: str, pages: Pages, rounds: int) -> list[str]:
    lines = []
    for where in ("Unix socket", "TCP"):
        calls: dict[str, Callable[[], Any]] = {
            "get": lambda where=where: pages.get(where),
            "bare get": lambda where=where: pages.bare_get(where, verified=False),
            "bare get, and verified": lambda where=where: pages.bare_get(where, verified=True),
            "pipelined get": lambda where=where: pages.pipelined_get(where, verified=False),
            "pipelined get, and verified": lambda where=where: pages.pipelined_get(where, verified=True),
            "put": lambda where=where: pages.put(where),
            "bare set": lambda where=where: pages.bare_set(where),
            "pipelined set": lambda where=where: pages.pipelined_set(where),
        }
        taken = in_turns(calls, rounds)
        for what, others in (
            ("get", ("bare get", "bare get, and verified", "pipelined get", "pipelined get, and verified")),
            ("put", ("bare set", "pipelined set")),
        ):
            lines += [f"| {text} | {where} | {cells(taken, pages.total, what, other)} |" for other in others]
    return lines


if __name__ == "__main__":
    sys.exit(main())
