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
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvplug_testing.waits import until
from vllm_engines import MULTIPROCESS, transfer_config

pytestmark = [pytest.mark.timeout(1200), pytest.mark.timing]

CPUS = sorted(os.sched_getaffinity(0))
NUM_WAVES, WAVE, NUM_TOKENS = 2, 16, 300
NUM_BUSY = 6
WAIT_S = 60.0
PATIENCE = {"wait_timeout_s": 20.0, "stall_timeout_s": 2.0}
"""As an operator has it, but for the fence, which is not what is tried here."""


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


@pytest.mark.skipif(len(CPUS) < 2, reason="there is one CPU")
def test_background_loads_beside_busy_processes_are_not_lost_and_take_no_longer_than_those_in_steps(
    start, free_port, install_plugin
):
    reporter, port, chance = install_plugin("thread_reporter"), free_port(), random.Random(1)
    waves = [
        [[chance.randrange(100, 40_000) for _ in range(NUM_TOKENS)] for _ in range(WAVE)]
        for _ in range(NUM_WAVES)
    ]
    with ExitStack() as stack:

        def begin(role: str, **lookup: Any) -> Any:
            options = {"lookup": {**PATIENCE, **lookup}}
            config = transfer_config(
                role, port, kv_load_failure_policy="recompute", timeout_s=30.0, options=options
            )
            settings = {"block_size": 32, "max_num_seqs": WAVE, "distributed_executor_backend": "mp"}
            env = {**MULTIPROCESS, "PYTHONPATH": reporter.pythonpath}
            return stack.enter_context(start(config, env=env, **settings))  # "mp" binds its workers

        prefill, sync = begin("kv_producer"), begin("kv_consumer")
        background = begin("kv_consumer", async_load=True)
        for wave in waves:
            prefill.generate(wave, max_tokens=1)
        took, answers = {}, {}
        with busy_processes():
            for name, engine in (("sync", sync), ("background", background)):
                engine.one(waves[0][0][:50], max_tokens=2)
                began = time.monotonic()
                answers[name] = [each for wave in waves for each in engine.generate(wave, max_tokens=2)]
                took[name] = time.monotonic() - began
                cached = {answer.num_cached for answer in answers[name]}
                assert cached == {(NUM_TOKENS - 1) // 32 * 32}, "some loads were lost"
                assert engine.count("transfer_failures") == 0
        assert answers["background"] == answers["sync"]
        print(f"{NUM_WAVES} waves of {WAVE} requests took {took}")
        assert took["background"] <= 2 * took["sync"]
        # All of kvplug's threads have copied by now, which is when OpenMP would bind them.
        for engine in (prefill, sync, background):
            run_where_they_may(engine, reporter.folder)


def run_where_they_may(engine: Any, reports: Path) -> None:
    """kvplug's threads in an engine's processes may use all CPUs, and the worker's main thread may not."""
    children = psutil.Process(engine.peer.pid).children(recursive=True)
    paths = [reports / f"{process.pid}.json" for process in children]
    ask = reports / "ask"
    ask.touch()
    until(lambda: sum(path.exists() for path in paths) >= 2, WAIT_S, "the answers of core and worker")
    ask.unlink()
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    mains = [threads.pop("MainThread") for threads in found]
    assert len(CPUS) > min(map(len, mains)), "vLLM binds no worker any more, and nothing is tried here"
    bound = {name: cpus for threads in found for name, cpus in threads.items() if cpus != CPUS}
    assert not bound, f"of {[*map(list, found)]} these may not use {CPUS}"
    assert any(threads for threads in found)
