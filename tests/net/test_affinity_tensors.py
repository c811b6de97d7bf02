"""OpenMP variables that bind threads do not change the CPUs of kvplug's threads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="a thread is bound to one of several CPUs")

PROGRAM = """
import json, os
import torch
from kvplug.transport import BackgroundThread

def look():
    return {"cpus": sorted(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}

def copy():
    torch.ones(2048, 2048).t().contiguous()  # torch shares it among its threads
    return look()

found = {"main": look()}
thread = BackgroundThread(lambda: found.update(ours=copy()), name="kvplug test", stop=lambda: None)
thread.start()
thread.join()
copy()
found["main after"] = look()
print(json.dumps(found))
"""


@pytest.fixture
def measured(output_of: Callable[..., str]) -> Callable[..., Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    kept |= {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    return lambda **variables: json.loads(output_of(PROGRAM, env={**kept, **variables}))


@pytest.mark.full
@pytest.mark.parametrize(
    "variables",
    [
        {"GOMP_CPU_AFFINITY": f"{CPUS[0]} {CPUS[1]}"} if len(CPUS) > 1 else {},
        {"OMP_PLACES": f"{{{CPUS[0]}}},{{{CPUS[1]}}}", "OMP_PROC_BIND": "true"} if len(CPUS) > 1 else {},
    ],
    ids=lambda variables: next(iter(variables), ""),
)
def test_a_thread_that_copies_keeps_its_cpus_where_openmp_binds_threads(
    variables: dict[str, str], measured: Any
) -> None:
    found = measured(**variables)
    assert found["main"] == {"cpus": CPUS[:1], "threads": 2}, "OpenMP has bound the program's main thread"
    assert found["ours"] == {"cpus": CPUS[:2], "threads": 1}
    assert found["main after"] == found["main"], "the program's own threads are as they were"
