"""Shared memory beside its alternatives: transports of kvplug, and every peer that is installed.

The harness is that of ``kvplug bench``; this adds peers that need more than torch and pyzmq: vLLM's message
queue, NIXL over UCX shared memory, iceoryx2, torch.multiprocessing, Unix sockets. One that is not installed
is skipped, with the reason. With ``--busy 0,1,2,4`` all are measured alone, and again beside so many
processes that only compute. ``python benchmarks/shm.py --help``; needs kvplug, kvplug-shm, torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import harness

from kvplug import Registry
from kvplug.config.units import format_bytes, parse_bytes
from kvplug.transport.queue import MAX_CHUNK_BYTES, MAX_CHUNKS
from kvplug_bench.candidate import (
    BASELINES,
    INTO,
    KEPT,
    LATENCY,
    LOOKED,
    PIPE,
    QUEUE,
    WAKE,
    Candidate,
    baseline,
)
from kvplug_bench.choice import transports
from kvplug_bench.plot import save_plot
from kvplug_bench.rounds import Outcome, Plan, run_rounds
from kvplug_bench.rows import COLUMNS, Comparison, cells, compare, medians, refused

HERE = Path(__file__).parent
ARENA_BYTES = 256 << 20
"""vLLM's arena has slots of this size."""


def peers(given: argparse.Namespace) -> list[Candidate]:
    """Every peer, installed or not: its own processes find out whether it is."""
    chunks = {"max_chunk_bytes": given.chunk_bytes, "max_chunks": given.chunks}
    vllm: dict[str, Any] = {"python": given.vllm_python, "env": _env(given.vllm_python)}
    if not Path(given.vllm_python).exists():
        vllm["skipped_because"] = f"{given.vllm_python} is not there"
    sockets = "peers.unix:UnixSockets"
    every = [
        _peer("nixl", PIPE, "peers.nixl_ucx:Nixl", ops=(INTO, LATENCY, WAKE)),
        _peer("nixl reads", PIPE, "peers.nixl_ucx:NixlReading", ops=(INTO, LATENCY, WAKE)),
        _peer("iceoryx2", PIPE, "peers.iceoryx:Iceoryx"),
        _peer("torch.multiprocessing", PIPE, "peers.torch_queue:TorchQueue"),
        _peer("unix socket", PIPE, sockets, arguments={"connections": 1}),
        _peer("2 unix sockets", PIPE, sockets, arguments={"connections": 2}),
        _peer("vllm", PIPE, "peers.vllm_queue:VllmPipe", arguments=chunks, **vllm),
        _peer(
            *("vllm", QUEUE, "peers.vllm_queue:VllmBroadcast"),
            arguments=chunks | {"arena": False},
            ops=(KEPT, LATENCY, WAKE),
            **vllm,
        ),
        _peer(
            *("vllm, arena", QUEUE, "peers.vllm_queue:VllmBroadcast"),
            arguments=chunks | {"arena": True},
            ops=(LOOKED,),
            largest_looked=ARENA_BYTES,
            **vllm,
        ),
    ]
    return [each for each in every if not given.only or each.name in given.only]


def _peer(name: str, kind: str, link: str, **more: Any) -> Candidate:
    return Candidate(**({"name": name, "kind": kind, "link": link, "baseline": True, "env": _env()} | more))


def _env(python: str = sys.executable) -> dict[str, str]:
    """Where processes find the peers; another interpreter's find kvplug there, too."""
    path = [str(HERE)]
    if python != sys.executable:
        root = HERE.parent
        path += [str(root), str(root / "plugins/kvplug-bench")]
    path += [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return {"PYTHONPATH": os.pathsep.join(path), "VLLM_LOGGING_LEVEL": "ERROR"}


def ours(given: argparse.Namespace) -> list[Candidate]:
    """The transports as they are set, and once more for each ``--also``, under its name."""
    registry, found = Registry.from_env(), []
    for name, more in [("", []), *given.also]:
        chosen = transports(
            registry,
            given.transport,
            path=None,
            overrides=[*given.set, *more],
            max_chunk_bytes=given.chunk_bytes,
            max_chunks=given.chunks,
        )
        found += [attrs.evolve(each, name=f"{each.name}, {name}" if name else each.name) for each in chosen]
    return found


def table(compared: Mapping[int, Sequence[Comparison]]) -> str:
    """By the number of busy processes; columns without figures are left out."""
    rows = [
        (str(busy), *cells(each, "" if each.row.bytes is None else format_bytes(each.row.bytes)))
        for busy, of_busy in compared.items()
        for each in of_busy
    ]
    heads = ("BUSY", *COLUMNS)
    filled = [i for i in range(compared.keys() == {0}, len(heads)) if any(row[i] for row in rows)]
    return harness.table([heads[i].lower() for i in filled], [[row[i] for i in filled] for row in rows])


def installed() -> Iterable[str]:
    for name in ("torch", "pyzmq", "nixl", "iceoryx2"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


def as_plain(
    outcomes: Mapping[int, Sequence[Outcome]], compared: Mapping[int, Sequence[Comparison]], about: str
) -> dict[str, Any]:
    """The rows with their ratios, medians with page faults, and every round."""
    each = [
        {
            "busy": busy,
            "name": outcome.candidate.name,
            "kind": outcome.candidate.kind,
            "skipped_because": outcome.skipped_because,
            "medians": [attrs.asdict(figures) for figures in medians(outcome)],
            "rounds": [[attrs.asdict(figures) for figures in done] for done in outcome.rounds],
        }
        for busy, of_busy in outcomes.items()
        for outcome in of_busy
    ]
    rows = [attrs.asdict(one) | {"busy": busy} for busy, of_busy in compared.items() for one in of_busy]
    return {"machine": about, "rows": rows, "outcomes": each}


def arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for each in text.split(",") if (name := each.strip())]

    def variant(text: str) -> tuple[str, list[str]]:
        name, _, option = text.partition(":")
        return name, [option]

    parser = harness.parser(__doc__, 7)
    parser.add_argument(
        "--transport", type=names, default=["shm"], metavar="A,B", help="as kvplug bench has it"
    )
    parser.add_argument("--baseline", type=names, default=list(BASELINES), metavar="A,B")
    parser.add_argument("--only", type=names, default=[], metavar="A,B", help="measure only these peers")
    parser.add_argument(
        *("--sizes", "-s"),
        type=lambda text: tuple(parse_bytes(each) for each in names(text)),
        default=tuple(1 << n for n in (12, 16, 20, 24, 26, 28)),
        metavar="A,B",
    )
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--chunk-bytes", type=parse_bytes, default=MAX_CHUNK_BYTES, metavar="SIZE")
    parser.add_argument("--chunks", type=int, default=MAX_CHUNKS, metavar="N")
    parser.add_argument(
        "--busy",
        type=lambda text: [int(each) for each in names(text)],
        default=[0],
        metavar="N,N",
        help="numbers of busy processes beside",
    )
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of a transport"
    )
    parser.add_argument(
        "--also",
        type=variant,
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE",
        help="the same transports again, with this option and under this name",
    )
    parser.add_argument(
        "--vllm-python", default=sys.executable, metavar="FILE", help="an interpreter that has vLLM"
    )
    parser.add_argument("--plot", metavar="FILE", help=".png or .svg")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    load_before = os.getloadavg()[0]
    candidates = ours(given)
    kinds = {each.kind for each in candidates}
    candidates += [each for name in given.baseline for each in baseline(name, kinds)]
    candidates += [each for each in peers(given) if each.kind in kinds]
    plan = Plan(sizes=given.sizes, rounds=given.rounds, readers=given.readers, idle_s=given.idle)

    def turn(candidate: Candidate, number: int) -> None:
        print(f"round {number + 1} of {given.rounds}: {candidate.kind} {candidate.name}", file=sys.stderr)

    outcomes = {}
    for number in given.busy:
        with harness.busy_processes(number):
            outcomes[number] = run_rounds(candidates, plan, turn)
    for outcome in itertools.chain.from_iterable(outcomes.values()):
        if outcome.skipped_because:
            print(f"{outcome.candidate.name}: skipped: {outcome.skipped_because}", file=sys.stderr)
        if outcome.last_output:
            print(outcome.last_output, file=sys.stderr)
    compared = {
        number: [
            comparison
            for outcome in of_busy
            for comparison in (*compare(outcome, of_busy), *refused(outcome, given.sizes))
        ]
        for number, of_busy in outcomes.items()
    }
    chunks = f"{given.chunks} x {format_bytes(given.chunk_bytes)}"
    load = f"load {load_before:.2f} before, {os.getloadavg()[0]:.2f} after"
    about = f"{given.rounds} rounds, float16, chunks {chunks}, readers {given.readers}, {load}."
    about = f"{harness.machine()}, {', '.join(installed())}. {about}"
    harness.write(given, table(compared), about, plain=as_plain(outcomes, compared, about))
    if given.plot:
        save_plot([each.row for each in compared[given.busy[0]]], given.plot)


if __name__ == "__main__":
    main()
