"""Engines of several processes: each worker loads from the peer's worker of its rank, and nothing is left.

Not with pipeline parallelism: vLLM 0.32's CPU build fails its own assertion in the second stage's first step,
with no connector configured either (``sync_and_gather_intermediate_tensors``: intermediate_tensors is None).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvplug_testing.waits import until
from vllm_engines import MULTIPROCESS, group, runs, transfer_config

pytestmark = pytest.mark.timeout(900)

BLOCK_SIZE = 32
WORKERS = range(2)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def begin(start, random_model):
    """``begin(transfer, **settings)``: an engine with a core and two workers, in a process each."""
    # Workers wait for each other by spinning. Where those of two engines are bound to the same processors,
    # Linux may let one of the engines wait for a minute.
    unbound = {**MULTIPROCESS, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    def begin_engine(transfer: Any = None, env: Any = (), **settings: Any) -> Any:
        return start(
            transfer,
            model=random_model("llama"),
            env={**unbound, **dict(env)},
            block_size=BLOCK_SIZE,
            tensor_parallel_size=len(WORKERS),
            distributed_executor_backend="mp",
            **settings,
        )

    return begin_engine


@pytest.fixture(scope="module")
def expected(begin, prompts) -> list[tuple[int, ...]]:
    """What one such engine alone answers to each prompt."""
    with begin() as alone:
        return [answer.tokens for answer in alone.generate(list(prompts.values()))]


@pytest.fixture(scope="module")
def faulty_worker(install_plugin):
    """The plugin of faulty_worker.py; the file ``corrupt`` in its folder is its switch."""
    return install_plugin("faulty_worker")


@pytest.fixture(scope="module")
def prefill(begin, expected, shared_port, faulty_worker) -> Iterator[Any]:
    config = transfer_config("kv_producer", shared_port)
    with begin(config, {"PYTHONPATH": faulty_worker.pythonpath}) as engine:
        yield engine


@pytest.fixture(scope="module", params=[False, True], ids=["layer by layer", "in the background"])
def decode(request, begin, prefill, shared_port) -> Iterator[Any]:
    options = {"lookup": {"async_load": request.param}}
    config = transfer_config("kv_consumer", shared_port, kv_load_failure_policy="recompute", options=options)
    with begin(config) as engine:
        running = [each for each in group(engine.peer.pid) if each.pid != engine.peer.pid]
        # Python's own lives as long as the process that asks for the stop.
        running = [each for each in running if "resource_tracker" not in " ".join(each.cmdline())]
        assert len(running) >= 1 + len(WORKERS)
        yield engine
        engine.ask("shut_down")
        until(lambda: not any(map(runs, running)), WAIT_S, f"the end of {running}")


def test_tokens_are_those_of_an_engine_of_as_many_processes_alone(prefill, decode, prompts, expected):
    asked = list(prompts.values())
    salt = str(decode.peer.pid)
    assert [answer.tokens for answer in prefill.generate(asked, salt=salt)] == expected
    answers = decode.generate(asked, salt=salt)
    assert [answer.tokens for answer in answers] == expected
    assert [answer.num_cached for answer in answers] == [(len(prompt) - 1) // 32 * 32 for prompt in asked]
    assert decode.count("operations", "op=load") == len(asked) * len(WORKERS)


def test_what_fails_to_load_at_one_worker_is_computed_by_all(
    prefill, decode, prompts, expected, faulty_worker
):
    asked = list(prompts.values())
    salt = f"failed, {decode.peer.pid}"
    prefill.generate(asked, max_tokens=1, salt=salt)
    loads = decode.count("operations", "op=load")
    switch = faulty_worker.folder / "corrupt"
    switch.touch()
    answers = decode.generate(asked, salt=salt)
    switch.unlink()
    assert [answer.tokens for answer in answers] == expected
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert decode.count("failures", "op=load") == len(asked), "at the one"
    assert decode.count("operations", "op=load") - loads == len(asked), "at the other"
    assert [answer.tokens for answer in decode.generate(asked, salt=salt)] == expected


def test_unknown_weights_are_the_same_in_all_processes_of_one_start_and_not_after_a_restart(
    begin, free_port, prompts, tmp_path
):
    options = {"fs": {"path": str(tmp_path)}}
    config = transfer_config("kv_both", free_port(), engine_id="restarts", stores=["fs"], options=options)
    prompt = max(prompts.values(), key=len)
    for _ in range(2):
        with begin(config, load_format="dummy", enable_prefix_caching=False) as engine:
            assert engine.one(prompt).num_cached == 0
            assert engine.one(prompt).num_cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
