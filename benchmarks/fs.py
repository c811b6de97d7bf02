"""What the store "fs" costs: gets and puts of pages, beside a plain parallel read and write of as many bytes.

    python benchmarks/fs.py [--folder DIR] [--sizes 64KiB,512KiB,4MiB] [--rounds N] [--markdown FILE]

The plain read opens the same files with the same number of threads and reads them into memory that is there
already. "and hash" computes the checksums of the same bytes, too. "and copy" also copies them once more, as
the store does, which reads a page into memory of its own first. The plain write makes as many
files, and renames each. All take turns within a round, in an order that changes, without the first. The
figures are medians, the shares medians of the shares within a round, with their quartiles.

Warm: the files are in the page cache. Cold: they are written to the disk, and the kernel is asked to drop
them (posix_fadvise), before each reading; then the figures are the disk's. A file system in memory is never
cold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

import kvplug
from kvplug.transport import PageBuffers, PageRequest, Series, Store
from kvplug.transport.store.folder.files import PageFolder
from kvplug.transport.store.format import opaque_format
from kvplug.transport.store.keys import foreign_key
from kvplug_fs.store import LAYOUT

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text: str) -> int:
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


class Pages:
    """Pages of one size in a store, and the plain reads and writes beside it."""

    def __init__(self, folder: Path, nbytes: int, total: int, threads: int) -> None:
        self.count = max(threads, total // nbytes)
        self.total = self.count * nbytes
        self.nbytes = nbytes
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._scratch = [memoryview(bytearray(nbytes + 4096)) for _ in range(threads)]
        self._folder = folder
        options = {"path": str(folder / "kv"), "size": 8 * self.total, "threads": threads}
        config = kvplug.Config.from_dict({"stores": ["fs"], "options": {"fs": options}})
        self.store: Store = kvplug.build_store(config)
        self.series = Series(opaque_format(nbytes), b"", self.store.seal.id)
        self._memory = PageBuffers(
            self.series.format, PageBuffers.empty(self.series.format, self.count).rows()
        )
        self._memory.rows().buffer[:] = secrets.token_bytes(1 << 10) * (self.total >> 10)
        self._kept = self._request(b"kept")
        self._put(self._kept)
        files = PageFolder(options["path"], LAYOUT, "path")
        self._paths = [files.path_of(key) for key in self._kept.keys]

    def close(self) -> None:
        self._pool.shutdown()
        self.store.close()

    def _request(self, name: bytes) -> PageRequest:
        identities = [name + b" %d" % index for index in range(self.count)]
        keys = [foreign_key(b"benchmark", identity) for identity in identities]
        return PageRequest(series=self.series, keys=keys, identities=identities, memory=self._memory)

    def _put(self, pages: PageRequest) -> None:
        assert not any(self.store.submit_put(pages).wait(600)), "a page was not kept"

    def _share(self, work: Callable[[int, Sequence[int]], None]) -> None:
        """Each thread does every so-manieth page."""
        parts = [range(first, self.count, self.threads) for first in range(self.threads)]
        for done in [self._pool.submit(work, first, part) for first, part in enumerate(parts)]:
            done.result()

    # -- reading -------------------------------------------------------------------------------

    def get(self) -> None:
        assert not any(self.store.submit_get(self._kept).wait(600)), "a page was missed"

    def read(self, hashes: bool = False, copies: bool = False) -> None:
        def work(number: int, part: Sequence[int]) -> None:
            scratch = self._scratch[number]
            for index in part:
                row = self._memory.rows().row(index)
                into = scratch[: self.nbytes] if copies else row
                fd = os.open(self._paths[index], os.O_RDONLY)
                try:
                    header = os.fstat(fd).st_size - self.nbytes
                    assert os.preadv(fd, [scratch[-header:], into], 0) == header + self.nbytes
                finally:
                    os.close(fd)
                if hashes:
                    xxhash.xxh3_64_digest(into)
                if copies:
                    row[:] = into

        self._share(work)

    def make_cold(self) -> None:
        for path in self._paths:
            fd = os.open(path, os.O_RDWR)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    # -- writing -------------------------------------------------------------------------------

    def put(self) -> Callable[[], None]:
        pages = self._request(secrets.token_bytes(8))
        self._put(pages)
        return lambda: self.store.submit_remove(pages.keys).wait(600) and None

    def write(self) -> Callable[[], None]:
        folder = Path(tempfile.mkdtemp(dir=self._folder))

        def work(number: int, part: Sequence[int]) -> None:
            for index in part:
                path = folder / str(index)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    assert os.write(fd, self._memory.rows().row(index)) == self.nbytes
                finally:
                    os.close(fd)
                os.rename(path, f"{path}.page")

        self._share(work)
        return lambda: shutil.rmtree(folder)


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, whose order changes. What a call returns, if anything, is called
    between the measurements. One round before them does not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        names = list(calls)
        at = number % len(names)
        for name in names[at:] + names[:at]:
            took, clean_up = seconds(calls[name])
            if clean_up is not None:
                clean_up()
            if number:
                taken[name].append(took)
    return taken


def cells(taken: Mapping[str, list[float]], nbytes: int, what: str, beside: str) -> str:
    """A row's cells: GB/s of two calls that move so many bytes, and the share of the first in the second."""
    low, share, high = quartiles(b / f for f, b in zip(taken[what], taken[beside], strict=True))
    ours, theirs = (nbytes / statistics.median_high(taken[name]) / 1e9 for name in (what, beside))
    return f"{what} | {ours:.3g} | {beside} | {theirs:.3g} | {share:.2f} | {low:.2f} to {high:.2f}"


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    done = call()
    return time.perf_counter() - began, done


def measure(pages: Pages, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each call in each round, by what is done."""
    reads: dict[str, Callable[[], Any]] = {
        "fs": pages.get,
        "plain read": pages.read,
        "and hash": lambda: pages.read(hashes=True),
        "and copy": lambda: pages.read(hashes=True, copies=True),
    }
    writes: dict[str, Callable[[], Any]] = {"fs": pages.put, "plain write": pages.write}
    taken: dict[str, dict[str, list[float]]] = {}
    for round_ in range(rounds + 1):
        for what, calls in (("get, warm", reads), ("get, cold", reads), ("put", writes)):
            names = list(calls)
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                if what == "get, cold":
                    pages.make_cold()
                took, clean_up = seconds(calls[name])
                if clean_up is not None:
                    clean_up()
                if round_:
                    taken.setdefault(what, {}).setdefault(name, []).append(took)
    return taken


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; of one value, that value three times."""
    found = list(values)
    low, middle, high = statistics.quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive")
    return low, middle, high


def add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")


def write(given: argparse.Namespace, text: str) -> None:
    """Print tables in Markdown, and write them to the files of :func:`add_outputs`."""
    print(text)
    if given.markdown:
        given.markdown.write_text(text + "\n", encoding="utf-8")
    if given.json:
        given.json.write_text(json.dumps(rows_in(text), indent=1) + "\n", encoding="utf-8")


def rows_in(text: str) -> list[dict[str, str]]:
    """The rows of tables in Markdown, as cells by the heads of their columns."""
    rows: list[dict[str, str]] = []
    head: list[str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line[1:-1].split("|")]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells
        elif not set(line) <= set("|-: "):
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def table(results: dict[str, Any]) -> str:
    lines = ["| pages | what | beside | fs, GB/s | beside it, GB/s | share | quartiles |", "| --- " * 7 + "|"]
    for pages, (total, taken) in results.items():
        for what, times in taken.items():
            for name, beside in times.items():
                if name == "fs":
                    continue
                low, share, high = quartiles(b / f for f, b in zip(times["fs"], beside, strict=True))
                figures = [total / statistics.median(each) / 1e9 for each in (times["fs"], beside)]
                lines.append(
                    f"| {pages} | {what} | {name} | {figures[0]:.2f} | {figures[1]:.2f} | {share:.2f}"
                    f" | {low:.2f} to {high:.2f} |"
                )
    return "\n".join(lines)


def machine(folder: Path, threads: int) -> str:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    kind = max(inside, key=lambda mount: len(mount[1]))[2]
    versions = f"Python {platform.python_version()}, kvplug {kvplug.__version__}, Linux {platform.release()}"
    return f"{len(models)} x {models[0]}, {versions}, {kind}, {threads} threads"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--folder", type=Path, help="where the files are made; default: among temporary files"
    )
    parser.add_argument("--sizes", default="64KiB,512KiB,4MiB")
    parser.add_argument("--total", type=size, default=256 << 20, help="bytes that are moved at once")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="kvplug-", dir=given.folder) as folder:
        for text in given.sizes.split(","):
            pages = Pages(Path(folder, text), size(text), given.total, given.threads)
            try:
                results[text] = (pages.total, measure(pages, given.rounds))
            finally:
                pages.close()
                shutil.rmtree(Path(folder, text))
        where = machine(Path(folder), given.threads)
    text = f"{table(results)}\n\n{where}, {given.rounds} rounds.\n"
    print(text)
    if given.markdown:
        given.markdown.write_text(text)
    if given.json:
        given.json.write_text(json.dumps({"machine": where, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
