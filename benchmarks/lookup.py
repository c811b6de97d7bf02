"""How long a lookup buffer takes to find an entry, with 100, 1,000 and 10,000 of them.

    python benchmarks/lookup.py [--rounds N] [--json FILE] [--markdown FILE]

Against a linear scan that compares each entry's tokens under its roi with the query's by
``torch.allclose``: what the family's simple buffer does, stated again here in the fewest lines. Entries
have 512 to 2,048 tokens and share a system prefix of 256, so every scanned entry is compared, and every
tree has one node with as many children as there are entries. The two take turns within a round. A hit asks
for an entry that is held; a miss has the system prefix and then goes its own way.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvplug
from kvplug_lookup.buffer.store import SimpleStore

COUNTS = (100, 1_000, 10_000)
PREFIX, SHORTEST, LONGEST, VOCABULARY = 256, 512, 2_048, 128_000
QUERIES = 50
"""Of the tree in each round; the scan takes as many as fit into SCAN_BUDGET_S, one at least."""
SCAN_BUDGET_S = 2.0


class LinearScan:
    """A list, searched from the oldest entry on."""

    def __init__(self) -> None:
        self.entries: list[tuple[torch.Tensor, torch.Tensor]] = []

    def insert(self, tokens: torch.Tensor, roi: torch.Tensor) -> None:
        self.entries.append((tokens, roi))

    def find(self, tokens: torch.Tensor, roi: torch.Tensor) -> int:
        wanted = tokens[roi]
        for held, held_roi in self.entries:
            key = held[held_roi]
            size = min(len(key), len(wanted))
            if torch.allclose(key[:size], wanted[:size]):
                return size
        return 0


def prompts(count: int, seed: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    system = np.random.default_rng(0).integers(0, VOCABULARY, PREFIX)
    lengths = rng.integers(SHORTEST, LONGEST, count, endpoint=True)
    return [
        torch.from_numpy(np.concatenate((system, rng.integers(0, VOCABULARY, length - PREFIX))))
        for length in lengths
    ]


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(count: int, rounds: int) -> dict[str, float]:
    """Medians in seconds for one number of entries."""
    held, missing = prompts(count, seed=1), prompts(QUERIES, seed=2)
    store, scan = SimpleStore(buffer_size=1 << 40), LinearScan()
    rois = {len(tokens): torch.ones(len(tokens), dtype=torch.bool) for tokens in (*held, *missing)}
    inserting = []
    for tokens in held:
        roi = rois[len(tokens)]
        inserting.append(seconds(lambda: store.insert(tokens, roi, None, None, None)))  # noqa: B023
        scan.insert(tokens.clone(), roi)
    rng = np.random.default_rng(3)
    taken: dict[str, list[float]] = {"match, hit": [], "match, miss": [], "drop_select, hit": []}
    scanned: dict[str, list[float]] = {"scan, hit": [], "scan, miss": []}
    for round_ in range(rounds + 1):
        hits = [held[at] for at in rng.integers(0, count, QUERIES)]
        times: dict[str, list[float]] = {name: [] for name in (*taken, *scanned)}
        for hit, miss in zip(hits, missing):
            roi = rois[len(hit)]
            assert store.match(hit, roi) == len(hit)
            times["match, hit"].append(seconds(lambda: store.match(hit, roi)))  # noqa: B023
            assert PREFIX <= store.match(miss, rois[len(miss)]) < SHORTEST
            times["match, miss"].append(seconds(lambda: store.match(miss, rois[len(miss)])))  # noqa: B023
            times["drop_select, hit"].append(seconds(lambda: store.drop_select(hit, roi)))  # noqa: B023
            store.insert(hit, roi, None, None, None)
        until = time.perf_counter() + SCAN_BUDGET_S
        for hit, miss in zip(hits, missing):
            times["scan, hit"].append(seconds(lambda: scan.find(hit, rois[len(hit)])))  # noqa: B023
            times["scan, miss"].append(seconds(lambda: scan.find(miss, rois[len(miss)])))  # noqa: B023
            if time.perf_counter() > until:
                break
        if round_:  # the first one warms up
            for table in (taken, scanned):
                for name in table:
                    table[name].append(statistics.median(times[name]))
    store.abort()
    result = {name: statistics.median(values) for name, values in (*taken.items(), *scanned.items())}
    return {"insert": statistics.median(inserting), **result}


def machine() -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    return f"{cpu()}, {versions}, kvplug {kvplug.__version__}"


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.machine()


def shown(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.1f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def markdown(report: dict[str, Any]) -> str:
    results: dict[str, dict[str, float]] = report["results"]
    head = [f"{int(count):,}" for count in results]
    lines = [f"| entries | {' | '.join(head)} |", "| --- " * (len(head) + 1) + "|"]
    names = next(iter(results.values()))
    lines += [f"| {name} | {' | '.join(shown(row[name]) for row in results.values())} |" for name in names]
    for kind in ("hit", "miss"):
        ratios = [f"{row[f'scan, {kind}'] / row[f'match, {kind}']:,.0f}x" for row in results.values()]
        lines.append(f"| scan / match, {kind} | {' | '.join(ratios)} |")
    growth = ", ".join(f"{name} {value:.2f}x" for name, value in report["growth"].items())
    return "\n".join(
        [*lines, "", f"From {head[0]} to {head[-1]} entries: {growth}.", "", report["machine"] + "."]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {str(count): measure(count, args.rounds) for count in args.counts}
    first, last = results[str(args.counts[0])], results[str(args.counts[-1])]
    growth = {name: last[name] / first[name] for name in first if not name.startswith("scan")}
    report = {"machine": machine(), "rounds": args.rounds, "results": results, "growth": growth}
    table = markdown(report)
    print(table)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(table + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
