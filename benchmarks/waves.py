"""Waves of requests whose KV another engine has: loaded in the background, and by the step that needs it.

    python benchmarks/waves.py [--waves N] [--requests N] [--tokens N] [--busy N] [--rounds N]
        [--markdown FILE]
    python benchmarks/waves.py --decisions

One engine has saved the prompts in its store "host"; another one, a process of its own, loads them with the
connector "lookup". Beside them run busy processes (default six), which take what processors there are. A wave
is 16 requests that arrive at once. "by the step": one step has all of them, and waits for their loads (the
option async_load is off). "in the background": steps of 5 ms go on, as those of other requests would, until
each load is reported. A request takes from the arrival of its wave until its KV is there. Both take turns,
wave by wave; engines and connections live on. The first rows read the store's memory, which is mapped.

`--decisions` feeds the model by which the connector decides whether to load or to compute with what engines
measure whose costs are known, as the tests do, and counts the decisions that are right.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness

import kvplug
from kvplug.engine import RequestEnd
from kvplug_testing import peers
from kvplug_testing.engine import FakeEngine, request_of

BLOCK_SIZE, NUM_LAYERS = 16, 24
STEP_S = 0.005
PATIENCE_S = 60.0


def config(role: str, *, is_async: bool = False, is_mapped: bool = True) -> kvplug.Config:
    return kvplug.Config.from_dict(
        {
            "connector": "lookup",
            "role": role,
            "connect_timeout_s": 60,
            "timeout_s": 30,
            "options": {
                "host": {"size": "1 GiB", "map": is_mapped},
                "lookup": {"load_policy": "always", "async_load": is_async},
            },
        }
    )


def prompt(wave: int, number: int, num_tokens: int) -> range:
    first = (wave * 1000 + number) * num_tokens
    return range(first, first + num_tokens)


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


# -- the engine that has the KV -------------------------------------------------------------------------


def save(parent: peers.Parent, num_waves: int, num_requests: int, num_tokens: int) -> None:
    with FakeEngine(
        config("producer"),
        listen="unix:",
        block_size=BLOCK_SIZE,
        num_blocks=2 * blocks_of(num_tokens),
        num_layers=NUM_LAYERS,
    ) as engine:
        for wave in range(num_waves):
            for number in range(num_requests):
                request = request_of(f"{wave}.{number}", prompt(wave, number, num_tokens))
                blocks = engine.prefill(request)
                engine.free_blocks.extend(blocks)
            parent.send(wave)
        parent.send(engine.worker.contact)
        parent.recv(None)


# -- the engine that loads it -----------------------------------------------------------------------------


class Loading:
    """One engine that loads."""

    def __init__(self, contact: str, given: argparse.Namespace, *, is_async: bool, is_mapped: bool) -> None:
        self._given = given
        self._is_async = is_async
        self._number = 0
        self.engine = FakeEngine(
            config("consumer", is_async=is_async, is_mapped=is_mapped),
            connect=contact,
            block_size=BLOCK_SIZE,
            num_blocks=(given.requests + 1) * blocks_of(given.tokens),
            num_layers=NUM_LAYERS,
        )
        self.engine.scheduler.wait_until_ready(PATIENCE_S)
        self.not_loaded = 0
        """Requests that were not promised, or of whose blocks some were not loaded."""

    def wave(self, wave: int) -> list[float]:
        """Seconds that each request took."""
        engine, tokens = self.engine, self._given.tokens
        self._number += 1
        began = time.perf_counter()
        requests = {}
        for number in range(self._given.requests):
            request = request_of(f"{self._number}.{number}", prompt(wave, number, tokens))
            found, _ = engine.matched(request)
            blocks = engine.allocate(tokens)
            engine.scheduler.update_state_after_alloc(request, (blocks,), found)
            requests[request.request_id] = (request, blocks, found)
            self.not_loaded += found == 0
        taken: list[float] = []
        waited = {each for each, (*_, found) in requests.items() if found}
        if self._is_async:
            while waited and time.perf_counter() - began < PATIENCE_S:
                report = engine.step([])
                self._note(report, requests)
                taken += [time.perf_counter() - began] * len(waited & report.finished_recving)
                waited -= report.finished_recving
                time.sleep(STEP_S)
            self.not_loaded += len(waited)
        else:
            scheduled = [(*each, tokens - each[2]) for each in requests.values()]
            self._note(engine.step(scheduled, compute=False), requests)
            taken = [time.perf_counter() - began] * len(waited)
        for request, blocks, _ in requests.values():
            engine.finish(request, blocks, RequestEnd.ABORTED)
            engine.free_blocks.extend(blocks)
        engine.settle()
        return taken

    def _note(self, report: Any, requests: dict[str, Any]) -> None:
        for _, blocks, _ in requests.values():
            self.not_loaded += bool(report.invalid_block_ids.intersection(blocks))


def measured(contact: str, given: argparse.Namespace, *, is_mapped: bool) -> list[list[str]]:
    taken: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as stack:
        loading = {}
        for is_async in taken:
            loading[is_async] = Loading(contact, given, is_async=is_async, is_mapped=is_mapped)
            stack.callback(loading[is_async].engine.__exit__)
        for each in loading.values():
            each.wave(0)  # connects, and warms up
        stack.enter_context(harness.busy_processes(given.busy))
        for turn in range(given.rounds):
            for wave in range(given.waves):
                for is_async in sorted(loading, reverse=bool((turn + wave) % 2)):
                    taken[is_async] += loading[is_async].wave(wave)
        lost = {is_async: each.not_loaded for is_async, each in loading.items()}
    rows, number = [], given.rounds * given.waves * given.requests
    base = statistics.median(taken[False])
    for is_async, what in ((False, "by the step"), (True, "in the background")):
        seconds = sorted(taken[is_async])
        median, most = statistics.median(seconds), seconds[int(0.9 * (len(seconds) - 1))]
        times = [f"{each * 1e3:.0f} ms" for each in (median, most, seconds[-1])]
        way = f"{'mapped' if is_mapped else 'over a pipe'}, {what}"
        rows.append([way, *times, f"{median / base:.2f}", f"{lost[is_async]} of {number}"])
    return rows


def decisions() -> str:
    """How many decisions are those of the true costs. Where both ways take about as long, either is right."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugins/kvplug-lookup/tests"))
    import test_lookup_costs as costs

    rows = []
    traffics = {"mostly decode": costs.decode_heavy, "mostly prefill": costs.prefill_heavy}
    for traffic, at_once, source in itertools.product(traffics, (1, 8), (costs.STORE, costs.PEER)):
        margin, right, number = {costs.STORE: 2.0, costs.PEER: 4.0}[source], 0, 0
        for seed, latency, per_loaded in itertools.product(range(5), (1e-4, 5e-3, 5e-2), (1e-6, 61e-6, 1e-3)):
            engine, dice = costs.Engine(61e-6, latency, per_loaded), random.Random(seed)
            traffics[traffic](engine, dice)
            for _ in range(10):
                engine.load(source, dice.choice([128, 1024, 8192]), at_once)
            for num_tokens in (128, 1024, 8192):
                ratio = engine.ratio(num_tokens)
                number += 1
                is_close = margin / 1.5 < ratio < margin * 1.5
                right += engine.decide(source, num_tokens) == (ratio < margin) or is_close
        rows.append([traffic, at_once, source, right, number, f"{right / number:.3f}"])
    return harness.table(["steps", "loads at once", "source", "right", "of", "share"], rows)


def main() -> None:
    parser = harness.parser(__doc__, 3)
    parser.add_argument("--waves", type=int, default=12, help="waves of a round (default 12)")
    parser.add_argument("--requests", type=int, default=16, help="requests of a wave (default 16)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a prompt (default 512)")
    parser.add_argument("--busy", type=int, default=6, help="busy processes beside (default 6)")
    parser.add_argument("--decisions", action="store_true", help="count right decisions to load or compute")
    given = parser.parse_args()
    if given.decisions:
        harness.write(given, decisions())
        return
    with peers.start(save, given.waves, given.requests, given.tokens, timeout_s=1200) as child:
        contact: Any = 0
        while not isinstance(contact, str):
            contact = child.recv(300)
        rows = [row for is_mapped in (True, False) for row in measured(contact, given, is_mapped=is_mapped)]
        child.send("end")
        child.result(60)
    what = f"{given.waves} waves of {given.requests} requests of {given.tokens} tokens"
    beside = f"{given.busy} busy processes on {os.cpu_count()} processors"
    head = ["loads", "median", "nine of ten", "longest", "of the first row", "not loaded"]
    harness.write(
        given,
        f"{what}, {given.rounds} rounds, beside {beside}:",
        harness.table(head, rows),
        f"{harness.machine()}.",
    )


if __name__ == "__main__":
    main()
