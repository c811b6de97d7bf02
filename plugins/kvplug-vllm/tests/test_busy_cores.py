"""vLLM binds its workers to cores that other programs use too: kvplug's threads run wherever there is room.

vLLM's worker spins on the core that it is bound to. Where kvplug's threads shared that core, every one of 64
background loads beside six busy processes timed out.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import psutil
import pytest

pytestmark = [pytest.mark.timeout(1200), pytest.mark.timing]

CPUS = sorted(os.sched_getaffinity(0))
NUM_WAVES, WAVE, NUM_TOKENS = 2, 16, 300
NUM_BUSY = 6
WAIT_S = 60.0
PATIENCE = {"timeout_s": 30.0, "options": {"lookup": {"wait_timeout_s": 20.0, "stall_timeout_s": 2.0}}}
"""As an operator has it, but for the fence, which is not what is tried here."""


@attrs.frozen
class Engines:
    prefill: Any
    sync: Any
    background: Any
    reports: Any


@pytest.fixture(scope="module")
def engines(
    start: Any, config_for: Any, multiprocess: Any, free_port: Any, install_plugin: Any
) -> Iterator[Engines]:
    if len(CPUS) < 2:
        pytest.skip("there is one CPU")
    reporter, port = install_plugin("thread_reporter"), free_port()

    def begin(role: str, **lookup: Any) -> Any:
        options = {"lookup": {**PATIENCE["options"]["lookup"], **lookup}}  # type: ignore[index]
        config = config_for(
            role, port, kv_load_failure_policy="recompute", timeout_s=PATIENCE["timeout_s"], options=options
        )
        return stack.enter_context(
            start(
                config,
                block_size=32,
                max_num_seqs=WAVE,
                distributed_executor_backend="mp",  # which binds its workers
                env={**multiprocess, "PYTHONPATH": reporter.pythonpath},
            )
        )

    with ExitStack() as stack:
        yield Engines(
            begin("kv_producer"),
            begin("kv_consumer"),
            begin("kv_consumer", async_load=True),
            reporter.folder,
        )


@contextmanager
def busy_processes() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


def failures(engine: Any) -> dict[str, float]:
    return {name: n for name, n in engine.metrics().items() if name.startswith("kvplug_transfer_failures")}


def test_background_loads_beside_busy_processes_are_not_lost_and_take_no_longer_than_those_in_steps(
    engines: Engines,
) -> None:
    chance = random.Random(1)
    waves = [
        [[chance.randrange(100, 40_000) for _ in range(NUM_TOKENS)] for _ in range(WAVE)]
        for _ in range(NUM_WAVES)
    ]
    for wave in waves:
        engines.prefill.generate(wave, max_tokens=1)
    for engine in (engines.sync, engines.background):
        engine.one(waves[0][0][:50], max_tokens=2)
    took = {"sync": 0.0, "background": 0.0}
    with busy_processes():
        for wave in waves:
            answers = {}
            for name in took:
                began = time.monotonic()
                answers[name] = getattr(engines, name).generate(wave, max_tokens=2)
                took[name] += time.monotonic() - began
            assert answers["background"] == answers["sync"]
            cached = {answer.num_cached for answer in answers["background"]}
            assert cached == {(NUM_TOKENS - 1) // 32 * 32}, "some loads were lost"
    print(f"{NUM_WAVES} waves of {WAVE} requests took {took}")
    assert not failures(engines.sync)
    assert not failures(engines.background)
    assert took["background"] <= 2 * took["sync"]
    # All of kvplug's threads have copied by now, which is when OpenMP would bind them.
    for engine in (engines.prefill, engines.sync, engines.background):
        run_where_they_may(engine, engines.reports)


def run_where_they_may(engine: Any, reports: Any) -> None:
    """kvplug's threads in an engine's processes may use all CPUs, and the worker's main thread may not."""
    children = psutil.Process(engine.peer.pid).children(recursive=True)
    ask = reports / "ask"
    ask.touch()
    limit = time.monotonic() + WAIT_S
    found: list[dict[str, list[int]]] = []
    while len(found) < 2:  # core and worker
        assert time.monotonic() < limit, f"{len(found)} processes have answered"
        time.sleep(0.1)
        paths = [reports / f"{process.pid}.json" for process in children]
        found = [json.loads(path.read_text()) for path in paths if path.exists()]
    ask.unlink()
    mains = [threads.pop("MainThread") for threads in found]
    assert len(CPUS) > min(map(len, mains)), "vLLM binds no worker any more, and nothing is tried here"
    bound = {name: cpus for threads in found for name, cpus in threads.items() if cpus != CPUS}
    assert not bound, f"of {[*map(list, found)]} these may not use {CPUS}"
    assert any(threads for threads in found)
