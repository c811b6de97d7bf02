"""vLLM as it is deployed: its core steps by itself in a process of its own, and so does each of its workers.

The connector is the probe of probe.py. Whether blocks are free again is asked of vLLM itself: it resets its
prefix cache only where no request holds any.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

WAIT_S = 60.0
"""For what takes milliseconds, unless the machine is busy."""
WORKERS = range(3)
"""As many as the model has KV heads."""


@pytest.fixture(scope="module")
def folder(probe: Any, tmp_path_factory: Any) -> Any:
    """Where the probe's orders and facts lie."""
    return probe.Folder(tmp_path_factory.mktemp("orders"))


@pytest.fixture(scope="module")
def engine(start: Any, probe: Any, multiprocess: Any, folder: Any, exits: Any) -> Any:
    return exits.enter_context(
        start(
            probe.config(folder),
            distributed_executor_backend="mp",
            tensor_parallel_size=len(WORKERS),
            block_size=32,
            env={**multiprocess, "PYTHONPATH": probe.PYTHONPATH, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
    )


def until(holds: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < limit, f"it did not come to this: {what}"
        time.sleep(0.01)


def makes_steps(folder: Any, number: int = 10) -> None:
    """The engine makes so many steps, with nothing from us."""
    before = folder.read("step")
    until(lambda: folder.read("step") >= before + number, f"{number} more steps")


def is_idle(engine: Any) -> None:
    """Returns when the core has no reason to step any more."""
    engine.utility("pause_scheduler", "wait", False, timeout=WAIT_S)
    engine.utility("resume_scheduler")


def test_what_workers_say_at_start_reaches_the_scheduler_side_whole_and_by_rank(
    engine: Any, folder: Any, probe: Any, prompts: Any, alone: Any
) -> None:
    got = folder.read("handshake")
    assert list(got) == list(WORKERS)
    for rank, said in got.items():
        pid = said.pop("pid")
        assert said == {**probe.HANDSHAKE, "rank": rank}
        assert pid not in (engine.ask("pid"), folder.read("scheduler pid"))
    assert engine.one(prompts[300]).tokens == alone[300]


def test_an_engine_without_a_request_steps_until_every_worker_has_named_what_it_kept(
    engine: Any, folder: Any, prompts: Any, alone: Any
) -> None:
    with folder.told("keep"):
        engine.one(prompts[700], max_tokens=4)
    request_id, _, kept = folder.read("finished")
    assert kept
    makes_steps(folder)
    assert engine.utility("reset_prefix_cache", False, False) is False, "the blocks are kept"
    # One worker, over and over, does not make up for the others.
    for _ in WORKERS:
        folder.put("say sent 0", [request_id])
        until(lambda: not folder.has("say sent 0"), "it was said")
        makes_steps(folder)
    folder.put("say sent 1", [request_id])
    until(lambda: not folder.has("say sent 1"), "it was said")
    makes_steps(folder)
    assert engine.utility("reset_prefix_cache", False, False) is False, "one worker is still sending"
    folder.put("say sent 2", [request_id])
    is_idle(engine)
    assert folder.has(f"sent {request_id}")
    assert engine.utility("reset_prefix_cache", False, False) is True
    assert engine.one(prompts[300]).tokens == alone[300]


def test_pending_work_keeps_an_idle_engine_stepping_until_there_is_none(
    engine: Any, folder: Any, prompts: Any, alone: Any
) -> None:
    with folder.told("pending"):
        engine.one(prompts[100], max_tokens=1)  # an engine that sleeps is woken by requests only
        makes_steps(folder, 50)
    is_idle(engine)
    assert engine.one(prompts[100]).tokens == alone[100]
