"""How long a lookup buffer takes to find an entry, with 100, 1,000 and 10,000 of them.

    python benchmarks/lookup.py [--rounds N] [--json FILE] [--markdown FILE]

Against a linear scan that compares each entry's tokens under its roi with the query's by
``torch.allclose``: what the family's simple buffer does, stated again here in the fewest lines. Entries
have 512 to 2,048 tokens and share a system prefix of 256, so every scanned entry is compared, and every
tree has one node with as many children as there are entries. The two take turns within a round. A hit asks
for an entry that is held; a miss has the system prefix and then goes its own way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import harness
import numpy as np
import torch

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


def measure(count: int, rounds: int) -> dict[str, float]:
    """Medians in seconds for one number of entries."""
    held, missing = prompts(count, seed=1), prompts(QUERIES, seed=2)
    store, scan = SimpleStore(buffer_size=1 << 40), LinearScan()
    rois = {len(tokens): torch.ones(len(tokens), dtype=torch.bool) for tokens in (*held, *missing)}
    inserting = []

    def timed(call: Callable[[], object]) -> float:
        return harness.seconds(call)[0]

    for tokens in held:
        roi = rois[len(tokens)]
        inserting.append(timed(lambda: store.insert(tokens, roi, None, None, None)))  # noqa: B023
        scan.insert(tokens.clone(), roi)
    rng = np.random.default_rng(3)
    names = ("match, hit", "match, miss", "drop_select, hit", "scan, hit", "scan, miss")
    taken: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        hits = [held[at] for at in rng.integers(0, count, QUERIES)]
        times: dict[str, list[float]] = {name: [] for name in names}
        for hit, miss in zip(hits, missing):
            roi = rois[len(hit)]
            assert store.match(hit, roi) == len(hit)
            times["match, hit"].append(timed(lambda: store.match(hit, roi)))  # noqa: B023
            assert PREFIX <= store.match(miss, rois[len(miss)]) < SHORTEST
            times["match, miss"].append(timed(lambda: store.match(miss, rois[len(miss)])))  # noqa: B023
            times["drop_select, hit"].append(timed(lambda: store.drop_select(hit, roi)))  # noqa: B023
            store.insert(hit, roi, None, None, None)
        until = time.perf_counter() + SCAN_BUDGET_S
        for hit, miss in zip(hits, missing):
            times["scan, hit"].append(timed(lambda: scan.find(hit, rois[len(hit)])))  # noqa: B023
            times["scan, miss"].append(timed(lambda: scan.find(miss, rois[len(miss)])))  # noqa: B023
            if time.perf_counter() > until:
                break
        if round_:  # the first one warms up
            for name in names:
                taken[name].append(statistics.median(times[name]))
    store.abort()
    return {name: statistics.median(values) for name, values in {"insert": inserting, **taken}.items()}


def shown(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.1f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def main() -> None:
    parser = harness.parser(__doc__, 5)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(count, given.rounds) for count in given.counts]
    rows = [[name, *(shown(of[name]) for of in results)] for name in results[0]]
    for kind in ("hit", "miss"):
        ratios = [f"{of[f'scan, {kind}'] / of[f'match, {kind}']:,.0f}x" for of in results]
        rows.append([f"scan / match, {kind}", *ratios])
    counts = [f"{count:,}" for count in given.counts]
    growth = ", ".join(
        f"{name} {results[-1][name] / first:.2f}x"
        for name, first in results[0].items()
        if not name.startswith("scan")
    )
    about = f"{harness.machine()}, torch {torch.__version__}, numpy {np.__version__}."
    grown = f"From {counts[0]} to {counts[-1]} entries: {growth}."
    harness.write(given, harness.table(["entries", *counts], rows), grown, about)


if __name__ == "__main__":
    main()
