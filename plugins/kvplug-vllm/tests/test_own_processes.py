"""vLLM as it is deployed: its core steps by itself in a process of its own, and so does each of its workers.

The connector is the probe of probe.py. Whether blocks are free again is asked of vLLM itself: it resets its
prefix cache only where no request holds any.
"""

from __future__ import annotations

from typing import Any

import pytest

import probe
from kvplug_testing.waits import until
from vllm_engines import MULTIPROCESS

pytestmark = pytest.mark.timeout(600)

WAIT_S = 60.0
"""For what takes milliseconds, unless the machine is busy."""
WORKERS = range(3)
"""As many as the model has KV heads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the probe's orders and facts."""
    return probe.Folder(tmp_path_factory.mktemp("orders"))


@pytest.fixture(scope="module")
def engine(start, probe_path: str, folder):
    with start(
        probe.config(folder),
        distributed_executor_backend="mp",
        tensor_parallel_size=len(WORKERS),
        block_size=32,
        env={**MULTIPROCESS, "PYTHONPATH": probe_path, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    ) as engine:
        yield engine


def makes_steps(folder: Any, number: int = 10) -> None:
    """The engine makes so many steps by itself."""
    before = folder.read("step")
    until(lambda: folder.read("step") >= before + number, WAIT_S, f"{number} more steps")


def is_idle(engine: Any) -> None:
    """Returns when the core has no reason to step any more."""
    engine.utility("pause_scheduler", "wait", False, timeout=WAIT_S)
    engine.utility("resume_scheduler")


def test_handshake_metadata_of_the_workers_reaches_the_scheduler_side_whole_and_by_rank(
    engine, folder, prompts, alone
):
    got = folder.read("handshake")
    assert list(got) == list(WORKERS)
    for rank, metadata in got.items():
        pid = metadata.pop("pid")
        assert metadata == {**probe.HANDSHAKE, "rank": rank}
        assert pid not in (engine.ask("pid"), folder.read("scheduler pid"))
    assert engine.one(prompts[300]).tokens == alone[300]


def test_an_engine_without_a_request_steps_until_every_worker_has_named_what_it_kept(
    engine, folder, prompts, alone
):
    with folder.ordered("keep"):
        engine.one(prompts[700], max_tokens=4)
    request_id, keeps = folder.read("finished")
    assert keeps
    makes_steps(folder)
    assert engine.utility("reset_prefix_cache", False, False) is False, "the blocks are kept"
    for rank in (0, 0, 0, 1):  # one worker, over and over, does not make up for the others
        order = f"name sent {rank}"
        folder.put(order, [request_id])
        until(lambda order=order: not folder.has(order), WAIT_S, "the worker's answer")
        makes_steps(folder)
    assert engine.utility("reset_prefix_cache", False, False) is False, "one worker is still sending"
    folder.put("name sent 2", [request_id])
    is_idle(engine)
    assert folder.has(f"sent {request_id}")
    assert engine.utility("reset_prefix_cache", False, False) is True
    assert engine.one(prompts[300]).tokens == alone[300]


def test_pending_work_keeps_an_idle_engine_stepping_until_there_is_none(engine, folder, prompts, alone):
    with folder.ordered("pending"):
        engine.one(prompts[100], max_tokens=1)  # an engine that sleeps is woken by requests only
        makes_steps(folder, 50)
    is_idle(engine)
    assert engine.one(prompts[100]).tokens == alone[100]
