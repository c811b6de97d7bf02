"""What the store "nixl" costs: gets and puts of pages, beside NIXL alone with files and objects as large.

    python benchmarks/nixl_store.py [--folder DIR] [--sizes 64KiB,1MiB,4MiB] [--total 64MiB] [--rounds N]

Over a folder, and over an S3 server of its own on this host (moto, in memory; the figures are mostly moto's).
"Bare" is one NIXL agent with as many threads as the store, and memory that is registered once: each thread
registers the file or the object, makes a transfer, and looks at it until it is done. It checks, renames,
counts and looks up nothing. All take turns within a round, in an order that changes, without the first. The
figures are medians, the shares medians of the shares within a round.
"""

from __future__ import annotations

import argparse
import itertools
import os
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

import boto3
import numpy
from fs import add_outputs, cells, in_turns, machine, size, write
from host import opened

from kvplug.transport import PageBuffers, PageRequest, Series
from kvplug.transport.store.format import opaque_format
from kvplug.transport.store.keys import foreign_key
from kvplug_nixl.library import nixl

TRANSFERS = 4
BUCKET = "bench-pages"
KEY = {"access_key": "benchmark", "secret_key": "0123456789"}


def served(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """A server with a bucket, until the stack ends. Returns the store's options."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = int(bound.getsockname()[1])
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    while True:
        with socket.socket() as client:
            if not client.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.05)
    endpoint = f"http://127.0.0.1:{port}"
    given = {"aws_access_key_id": KEY["access_key"], "aws_secret_access_key": KEY["secret_key"]}
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **given).create_bucket(Bucket=BUCKET)
    secret = folder / "secret"
    secret.write_text(KEY["secret_key"])
    return {
        "bucket": BUCKET,
        "endpoint": endpoint,
        "access_key": KEY["access_key"],
        "secret_key_file": str(secret),
    }


class Bare:
    """NIXL alone."""

    def __init__(self, backend: str, parameters: dict[str, str], memory: memoryview, folder: Path) -> None:
        self._backend, self._folder = backend, folder
        self._kind = "FILE" if backend == "POSIX" else "OBJ"
        self._numbers = itertools.count(1)
        self._address = numpy.frombuffer(memory, numpy.uint8).ctypes.data
        with nixl({"AWS_EC2_METADATA_DISABLED": "true"}) as api:
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
            self._agent = api.nixl_agent(f"bare-{secrets.token_hex(4)}", config)
            self._agent.create_backend(backend, parameters)
        self._agent.register_memory([(self._address, memory.nbytes, 0, "")], "DRAM", [backend])

    def move(self, operation: str, name: str, begin: int, nbytes: int) -> None:
        fd = -1
        if self._kind == "FILE":
            flags = os.O_RDONLY if operation == "READ" else os.O_RDWR | os.O_CREAT | os.O_TRUNC
            fd = os.open(self._folder / name, flags, 0o600)
        agent, number = self._agent, fd if fd >= 0 else next(self._numbers)
        registered = agent.register_memory([(0, 0, number, name)], self._kind, [self._backend])
        here = agent.get_xfer_descs([(self._address + begin, nbytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(0, nbytes, number)], self._kind)
        handle = agent.initialize_xfer(operation, here, there, agent.name, b"", [self._backend])
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(2e-5)
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        handle.release()
        agent.deregister_memory(registered, [self._backend])
        if fd >= 0:
            os.close(fd)


class Pages:
    """Pages of one size, in the store and in plain files or objects."""

    def __init__(
        self, stack: ExitStack, options: dict[str, Any], folder: Path, nbytes: int, total: int
    ) -> None:
        self.count = max(TRANSFERS, total // nbytes)
        self.total = self.count * nbytes
        self._nbytes = nbytes
        self._memory = PageBuffers.empty(opaque_format(nbytes), self.count)
        self._memory.rows().buffer[:] = secrets.token_bytes(1 << 10) * (self.total >> 10)
        self._pool = stack.enter_context(ThreadPoolExecutor(TRANSFERS))
        self._folder = folder / f"bare{nbytes}"
        self._folder.mkdir()
        if "bucket" in options:
            parameters = {**KEY, "bucket": BUCKET, "endpoint_override": options["endpoint"], "scheme": "http"}
            parameters |= {"req_checksum": "required", "num_threads": "16"}
            self._bare = Bare("OBJ", parameters, self._memory.rows().buffer, self._folder)
            options = {**options, "prefix": f"bench{nbytes}"}
        else:
            self._bare = Bare("POSIX", {"use_aio": "true"}, self._memory.rows().buffer, self._folder)
            options = {"path": str(folder / f"kv{nbytes}"), "size": 64 * self.total}
        self._store = opened(stack, {**options, "transfers": TRANSFERS}, name="nixl")
        self._series = Series(opaque_format(nbytes), b"", self._store.seal.id)
        self._kept = self._request(b"kept")
        assert not any(self._store.submit_put(self._kept).wait(100)), "a page was not kept"
        self._move("WRITE", "kept")

    def _request(self, name: bytes) -> PageRequest:
        identities = [name + b" %d" % index for index in range(self.count)]
        keys = [foreign_key(b"benchmark", identity) for identity in identities]
        return PageRequest(series=self._series, keys=keys, identities=identities, memory=self._memory)

    def _move(self, operation: str, name: str) -> None:
        def work(index: int) -> None:
            self._bare.move(operation, f"{name}-{index}", index * self._nbytes, self._nbytes)

        for done in [self._pool.submit(work, index) for index in range(self.count)]:
            done.result()

    def lookup(self) -> None:
        found = self._store.submit_lookup(self._kept.keys).wait(100)
        assert [str(each) for each in found] == ["held"] * self.count

    def get(self) -> None:
        assert not any(self._store.submit_get(self._kept).wait(100)), "a page was missed"

    def bare_get(self) -> None:
        self._move("READ", "kept")

    def put(self) -> Callable[[], None]:
        pages = self._request(secrets.token_bytes(8).hex().encode())
        assert not any(self._store.submit_put(pages).wait(100)), "a page was not kept"
        return lambda: self._store.submit_remove(pages.keys).wait(100) and None

    def bare_put(self) -> Callable[[], None]:
        name = secrets.token_bytes(8).hex()
        self._move("WRITE", name)

        def clean_up() -> None:
            for path in self._folder.glob(f"{name}-*"):
                path.unlink()

        return clean_up


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--sizes", default="64KiB,1MiB,4MiB")
    parser.add_argument("--total", type=size, default=64 << 20, help="bytes that are moved at once")
    parser.add_argument("--rounds", type=int, default=9)
    add_outputs(parser)
    given = parser.parse_args()
    lines = ["| pages | over | what | nixl, GB/s | beside | GB/s | share | quartiles |", "| --- " * 8 + "|"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplug-", dir=given.folder)))
        bucket = served(stack, folder)
        for where, options in (("files", {}), ("S3", bucket)):
            own = folder / where
            own.mkdir()
            for text in given.sizes.split(","):
                with ExitStack() as one:
                    pages = Pages(one, options, own, size(text), given.total)
                    lines += rows_of(text, where, pages, given.rounds)
                print(*lines[-3:], sep="\n", file=sys.stderr)
    text = "\n".join(lines) + f"\n\n{machine(given.folder, TRANSFERS)}, {given.rounds} rounds.\n"
    write(given, text)
    return 0


def rows_of(text: str, where: str, pages: Pages, rounds: int) -> list[str]:
    calls: dict[str, Callable[[], Any]] = {
        "get": pages.get,
        "bare get": pages.bare_get,
        "put": pages.put,
        "bare put": pages.bare_put,
        "lookup": pages.lookup,
    }
    taken = in_turns(calls, rounds)
    lines = []
    for what, beside in (("get", "bare get"), ("put", "bare put")):
        lines.append(f"| {text} | {where} | {cells(taken, pages.total, what, beside)} |")
    each = sorted(taken["lookup"])[rounds // 2] / pages.count * 1e6
    lines.append(f"| {text} | {where} | lookup of {pages.count} pages | {each:.0f} us each | | | | |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
