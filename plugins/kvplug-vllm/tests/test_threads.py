"""vLLM binds its workers to cores that other programs use too: kvplug's threads run wherever there is room.

vLLM's worker spins on the core that it is bound to. Where kvplug's threads shared that core, every one of 64
background loads beside six busy processes timed out.
"""

from __future__ import annotations

import json
import os

import psutil
import pytest

from kvplug_testing.waits import until
from vllm_engines import MULTIPROCESS, transfer_config

CPUS = sorted(os.sched_getaffinity(0))


@pytest.mark.timeout(600)
@pytest.mark.skipif(len(CPUS) < 2, reason="there is one CPU")
def test_kvplugs_threads_may_use_all_cpus_and_vllms_main_thread_of_a_worker_may_not(
    start, port, prompts, install_plugin
):
    reporter = install_plugin("thread_reporter")
    config = transfer_config("kv_both", port, options={"lookup": {"async_load": True}})
    env = {**MULTIPROCESS, "PYTHONPATH": reporter.pythonpath}
    with start(config, block_size=32, env=env, distributed_executor_backend="mp") as engine:
        for num_cached in (0, 288):  # all threads have copied then, which is when OpenMP would bind them
            assert engine.one(prompts[300]).num_cached == num_cached
            assert engine.ask("reset_prefix_cache")
        children = psutil.Process(engine.peer.pid).children(recursive=True)
        paths = [reporter.folder / f"{process.pid}.json" for process in children]
        (reporter.folder / "ask").touch()
        until(lambda: sum(path.exists() for path in paths) >= 2, 60, "the answers of core and worker")
        found = [json.loads(path.read_text()) for path in paths if path.exists()]
    mains = [threads.pop("MainThread") for threads in found]
    assert len(CPUS) > min(map(len, mains)), "vLLM binds no worker any more, and nothing is tried here"
    names = [name for threads in found for name in threads]
    assert names
    bound = {name: cpus for threads in found for name, cpus in threads.items() if cpus != CPUS}
    assert not bound, f"of {names} these may not use {CPUS}"
