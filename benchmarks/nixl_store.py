"""What the store "nixl" costs: gets and puts of pages, beside NIXL alone with files and objects as large.

    python benchmarks/nixl_store.py [--folder DIR] [--sizes 64KiB,1MiB,4MiB] [--total 64MiB] [--rounds N]

Over a folder, and over an S3 server of its own on this host (moto, in memory; the figures are mostly moto's).
"Bare" is one NIXL agent with as many threads as the store, and memory that is registered once: each thread
registers the file or the object, makes a transfer, and looks at it until it is done. It checks, renames,
counts and looks up nothing. All take turns within a round, in an order that changes, without the first. The
figures are medians, the shares medians of the shares within a round.
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import harness
import numpy

from kvplug.config.units import parse_bytes
from kvplug_nixl.library import nixl

TRANSFERS = 4
BUCKET = "bench-pages"
KEY = {"access_key": "benchmark", "secret_key": "0123456789"}


def served(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """A server with a bucket, until the stack ends. Returns the store's options."""
    (port,) = harness.free_ports(1)
    harness.started(stack, [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port], port)
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


class Pages(harness.Pages):
    """Pages of one size, in the store and in plain files or objects."""

    def __init__(
        self, stack: ExitStack, options: dict[str, Any], folder: Path, nbytes: int, total: int
    ) -> None:
        super().__init__(nbytes, total, TRANSFERS)
        self._folder = folder / f"bare{nbytes}"
        self._folder.mkdir()
        if "bucket" in options:
            parameters = {**KEY, "bucket": BUCKET, "endpoint_override": options["endpoint"], "scheme": "http"}
            parameters |= {"req_checksum": "required", "num_threads": "16"}
            self._bare = Bare("OBJ", parameters, self.rows.buffer, self._folder)
            options = {**options, "prefix": f"bench{nbytes}"}
        else:
            self._bare = Bare("POSIX", {"use_aio": "true"}, self.rows.buffer, self._folder)
            options = {"path": str(folder / f"kv{nbytes}"), "size": 64 * self.total}
        self.store = harness.opened(stack, {**options, "transfers": TRANSFERS}, name="nixl")
        self.keep(self.store)
        self.move("WRITE", "kept")

    def move(self, operation: str, name: str) -> None:
        self.each(
            lambda index: self._bare.move(operation, f"{name}-{index}", index * self.nbytes, self.nbytes)
        )

    def lookup(self) -> None:
        found = self.store.submit_lookup(self.kept[self.store].keys).wait(100)
        assert [str(each) for each in found] == ["held"] * self.count

    def bare_put(self) -> Callable[[], None]:
        name = secrets.token_hex(8)
        self.move("WRITE", name)

        def clean_up() -> None:
            for path in self._folder.glob(f"{name}-*"):
                path.unlink()

        return clean_up


def rows_of(text: str, where: str, pages: Pages, rounds: int) -> list[list[str]]:
    calls = {
        "get": lambda: pages.get(pages.store),
        "bare get": lambda: pages.move("READ", "kept"),
        "put": lambda: pages.put(pages.store),
        "bare put": pages.bare_put,
        "lookup": pages.lookup,
    }
    taken = harness.in_turns(calls, rounds)
    pairs = (("get", "bare get"), ("put", "bare put"))
    rows = [[text, where, *harness.beside(taken, pages.total, *pair)] for pair in pairs]
    each = sorted(taken["lookup"])[rounds // 2] / pages.count * 1e6
    return [*rows, [text, where, f"lookup of {pages.count} pages", f"{each:.0f} us each", *[""] * 4]]


def main() -> None:
    parser = harness.page_parser(__doc__, "64KiB,1MiB,4MiB")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplug-", dir=given.folder)))
        for where, options in (("files", {}), ("S3", served(stack, folder))):
            own = folder / where
            own.mkdir()
            for text in given.sizes:
                with ExitStack() as one:
                    pages = Pages(one, options, own, parse_bytes(text), given.total)
                    rows += rows_of(text, where, pages, given.rounds)
    head = ["pages", "over", "what", "nixl, GB/s", "beside", "GB/s", "share", "quartiles"]
    about = f"{harness.machine(given.folder)}, {TRANSFERS} transfers, {given.rounds} rounds."
    harness.write(given, harness.table(head, rows), about)


if __name__ == "__main__":
    main()
