"""What the benchmarks have in common: arguments, turns, figures, tables, programs, and pages of a store."""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import kvplug
from kvplug.config.units import parse_bytes
from kvplug.transport import PageBuffers, PageRequest, Series, Store
from kvplug.transport.store.format import PageFormat, opaque_format
from kvplug.transport.store.keys import foreign_key

PATIENCE_S = 120.0
T = TypeVar("T")
CleanUp = Callable[[], object]


# -- arguments and tables ----------------------------------------------------------------------------


def parser(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with ``--json`` and ``--markdown``, and with ``--rounds`` if there is a default for it."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    add_outputs(made)
    return made


def page_parser(
    description: str | None, sizes: str, total: str = "64MiB", rounds: int = 9
) -> argparse.ArgumentParser:
    """With ``--sizes`` of pages, and ``--total``, too."""
    made = parser(description, rounds)
    made.add_argument("--sizes", type=lambda text: text.split(","), default=sizes.split(","))
    made.add_argument("--total", type=parse_bytes, default=parse_bytes(total), help="bytes moved at once")
    return made


def add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def write(given: argparse.Namespace, *parts: str, plain: Any = None) -> None:
    """Print tables in Markdown, and write them to the files of :func:`add_outputs`; or ``plain`` to the JSON
    file.
    """
    text = "\n\n".join(parts)
    print(text)
    if given.markdown:
        given.markdown.write_text(text + "\n", encoding="utf-8")
    if given.json:
        given.json.write_text(json.dumps(plain or rows_in(text), indent=1) + "\n", encoding="utf-8")


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


def machine(folder: Path | None = None) -> str:
    """The processors, the versions, and the file system of the folder, if there is one."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = f"{len(models)} x {models[0]}" if models else f"{os.cpu_count()} x {platform.machine()}"
    versions = f"Python {platform.python_version()}, kvplug {kvplug.__version__}, Linux {platform.release()}"
    if folder is None:
        return f"{cpu}, {versions}"
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return f"{cpu}, {versions}, {max(inside, key=lambda mount: len(mount[1]))[2]}"


# -- turns and figures -------------------------------------------------------------------------------


def in_order(names: Iterable[T], number: int) -> list[T]:
    """All of them, in round ``number``: each round begins with another one."""
    every = list(names)
    at = number % len(every)
    return every[at:] + every[:at]


def in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, prepare: Callable[[], object] = bool
) -> dict[str, list[float]]:
    """Seconds of each call in each round. What a call returns, if anything, is called between the
    measurements, and ``prepare`` before each. One round before them does not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in in_order(calls, number):
            prepare()
            took, clean_up = seconds(calls[name])
            if clean_up is not None:
                clean_up()
            if number:
                taken[name].append(took)
    return taken


def rounds(
    names: Iterable[str], count: int, measure: Callable[[str], Mapping[str, float]]
) -> dict[str, dict[str, list[float]]]:
    """The figures of each candidate, in each round."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for number in range(count):
        for name in in_order(found, number):
            for what, figure in measure(name).items():
                found[name].setdefault(what, []).append(figure)
    return found


def seconds(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    done = call()
    return time.perf_counter() - began, done


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; of one value, that value three times."""
    found = list(values)
    low, middle, high = statistics.quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive")
    return low, middle, high


def ratio(one: Iterable[float], other: Iterable[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def spread(one: Iterable[float], other: Iterable[float]) -> tuple[str, str]:
    """Two cells: :func:`ratio`, and the quartiles of the ratios."""
    low, middle, high = quartiles(a / b for a, b in zip(one, other, strict=True))
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def gb_per_s(taken: Sequence[float], nbytes: int) -> str:
    return f"{nbytes / statistics.median(taken) / 1e9:.3g}"


def beside(taken: Mapping[str, Sequence[float]], nbytes: int, what: str, other: str) -> list[str]:
    """A row's cells: GB/s of two calls that move so many bytes, and the share of the first in the second."""
    speeds = [gb_per_s(taken[name], nbytes) for name in (what, other)]
    return [what, speeds[0], other, speeds[1], *spread(taken[other], taken[what])]


# -- programs ----------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens at now."""
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]


def started(
    stack: ExitStack, command: Sequence[object], port: int | None = None, **more: Any
) -> subprocess.Popen[str]:
    """A program, until the stack ends; once something listens at ``port``."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    program = subprocess.Popen([*map(str, command)], **{**streams, **more})
    stack.callback(program.wait)
    stack.callback(program.terminate)
    while port is not None:
        assert program.poll() is None, f"{command[0]} has ended"
        with socket.socket() as client:
            if not client.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.02)
    return program


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that only compute."""
    with ExitStack() as stack:
        for _ in range(count):
            started(stack, [sys.executable, "-c", "while True: pass"])
        yield


def served(stack: ExitStack, address: str, budget: int, *options: str, **more: Any) -> int:
    """A program that serves a store "host", until the stack ends. Returns its process id."""
    run = "from kvplug.cli.main import main; main()"
    command = [sys.executable, "-c", run, "store", "serve", "host", "--address", address]
    options = ("--set=timeout_s=120", f"--set=options.host.size={budget}", *options)
    program = started(stack, [*command, *options], **more)
    assert program.stdout is not None
    assert program.stdout.readline().strip() == address, "the program does not serve"
    return program.pid


# -- stores and pages --------------------------------------------------------------------------------


def opened(stack: ExitStack, options: dict[str, Any], *, name: str = "host", **common: Any) -> Store:
    given = {"stores": [name], "timeout_s": PATIENCE_S, "options": {name: options}, **common}
    store = kvplug.build_store(kvplug.Config.from_dict(given))
    stack.callback(store.close)
    return store


def series(store: Store, form: PageFormat) -> Series:
    return Series(form, b"", store.seal.id)


def request(series: Series, memory: Any, name: bytes, count: int) -> PageRequest:
    """For so many pages under the name."""
    identities = [name + b" %d" % index for index in range(count)]
    keys = [foreign_key(b"benchmark", identity) for identity in identities]
    return PageRequest(series=series, keys=keys, identities=identities, memory=memory)


def put(store: Store, pages: PageRequest) -> CleanUp:
    """Put them all. Returns what removes them."""
    assert not any(store.submit_put(pages).wait(PATIENCE_S)), "a page was not kept"
    return lambda: store.submit_remove(pages.keys).wait(PATIENCE_S)


def get(store: Store, pages: PageRequest) -> None:
    assert not any(store.submit_get(pages).wait(PATIENCE_S)), "a page was missed"


class Pages:
    """Pages of one size with arbitrary content, for stores and for what is measured beside them."""

    def __init__(self, nbytes: int, total: int, threads: int = 1) -> None:
        self.count = max(threads, total // nbytes)
        self.total = self.count * nbytes
        self.nbytes = nbytes
        self.threads = threads
        self.form = opaque_format(nbytes)
        self.memory = PageBuffers.empty(self.form, self.count)
        self.rows = self.memory.rows()
        self.rows.buffer[:] = secrets.token_bytes(1 << 10) * (self.total >> 10)
        self.kept: dict[Store, PageRequest] = {}
        self._pool = ThreadPoolExecutor(threads)

    def request(self, store: Store, name: bytes) -> PageRequest:
        return request(series(store, self.form), self.memory, name, self.count)

    def keep(self, store: Store, *, is_there: bool = False) -> None:
        """Put the pages that :meth:`get` gets, unless another store has put them there."""
        self.kept[store] = self.request(store, b"kept")
        if not is_there:
            put(store, self.kept[store])

    def get(self, store: Store) -> None:
        get(store, self.kept[store])

    def put(self, store: Store) -> CleanUp:
        return put(store, self.request(store, secrets.token_bytes(8).hex().encode()))

    def each(self, work: Callable[[int], object], every: Iterable[int] | None = None) -> None:
        """Call ``work`` with the number of every page, or of ``every`` part, in the threads."""
        for done in [self._pool.submit(work, each) for each in every or range(self.count)]:
            done.result()
