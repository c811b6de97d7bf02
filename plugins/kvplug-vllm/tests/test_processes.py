"""Engines of several processes: each worker loads from the peer's worker of its rank, and nothing is left.

Not with pipeline parallelism: vLLM 0.32's CPU build fails its own assertion in the second stage's first step,
with no connector configured either (``sync_and_gather_intermediate_tensors``: intermediate_tensors is None).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from kvplug_testing.waits import until
from vllm_engines import MULTIPROCESS, group, runs, transfer_config

pytestmark = pytest.mark.timeout(900)

BLOCK_SIZE = 32
KINDS: dict[str, dict[str, Any]] = {
    "a core": {},
    "a core and two workers": {"tensor_parallel_size": 2},
}
WAIT_S = 120.0
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Workers wait for each other by spinning. Where those of two engines are bound to the same processors, Linux
may let one of the engines wait for a minute."""


@pytest.fixture(scope="session")
def faulty_worker(install_plugin):
    """The plugin of faulty_worker.py; the file ``corrupt`` in its folder is its switch."""
    return install_plugin("faulty_worker")


class Kind:
    """Engines of one kind."""

    def __init__(self, start: Any, model: str, env: dict[str, str], settings: dict[str, Any]) -> None:
        self._start = start
        self._given: dict[str, Any] = {"model": model, "env": env, "block_size": BLOCK_SIZE, **settings}
        self.num_workers = settings.get("tensor_parallel_size", 1)
        self.num_processes = 1 + self.num_workers if self.num_workers > 1 else 1
        """One worker lives in the core's."""
        if self.num_workers > 1:
            self._given |= {"distributed_executor_backend": "mp", "env": {**env, **UNBOUND}}

    def start(self, transfer: Any = None, settings: Any = None, **env: str) -> Any:
        return self._start(
            transfer, **{**self._given, **(settings or {}), "env": {**self._given["env"], **env}}
        )


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request, start, random_model) -> Kind:
    return Kind(start, random_model("llama"), MULTIPROCESS, KINDS[request.param])


@pytest.fixture(scope="module")
def said(kind: Kind, prompts) -> list[tuple[int, ...]]:
    """What one engine of this kind alone says to each prompt."""
    with kind.start() as alone:
        return [answer.tokens for answer in alone.generate(list(prompts.values()))]


@pytest.fixture(scope="module")
def shared_port(kind: Kind, free_port) -> int:
    """The first of as many as there are workers."""
    return int(free_port())


@pytest.fixture(scope="module")
def prefill(kind: Kind, said, shared_port, faulty_worker) -> Iterator[Any]:
    with kind.start(
        transfer_config("kv_producer", shared_port), PYTHONPATH=faulty_worker.pythonpath
    ) as engine:
        yield engine


@pytest.fixture(scope="module", params=[False, True], ids=["layer by layer", "in the background"])
def decode(request, kind: Kind, prefill, shared_port) -> Iterator[Any]:
    options = {"lookup": {"async_load": request.param}}
    config = transfer_config("kv_consumer", shared_port, kv_load_failure_policy="recompute", options=options)
    with kind.start(config) as engine:
        running = [each for each in group(engine.peer.pid) if each.pid != engine.peer.pid]
        # Python's own lives as long as the process that asks for the stop.
        running = [each for each in running if "resource_tracker" not in " ".join(each.cmdline())]
        assert len(running) >= kind.num_processes
        yield engine
        engine.call("inside:shut_down")
        until(lambda: not any(map(runs, running)), WAIT_S, f"the end of {running}")


def test_tokens_are_those_of_an_engine_of_as_many_processes_alone(kind, prefill, decode, prompts, said):
    asked = list(prompts.values())
    salt = str(decode.peer.pid)
    assert [answer.tokens for answer in prefill.generate(asked, salt=salt)] == said
    answers = decode.generate(asked, salt=salt)
    assert [answer.tokens for answer in answers] == said
    assert [answer.num_cached for answer in answers] == [(len(prompt) - 1) // 32 * 32 for prompt in asked]
    assert decode.count("transfers", "op=load") == len(asked) * kind.num_workers


def test_unknown_weights_are_the_same_in_all_processes_of_one_start_and_not_after_a_restart(
    kind, free_port, prompts, tmp_path
):
    options = {"fs": {"path": str(tmp_path)}}
    config = transfer_config("kv_both", free_port(), engine_id="restarts", stores=["fs"], options=options)
    prompt = max(prompts.values(), key=len)
    for _ in range(2):
        with kind.start(config, {"load_format": "dummy", "enable_prefix_caching": False}) as engine:
            assert engine.one(prompt).num_cached == 0
            assert engine.one(prompt).num_cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_each_worker_listens_on_a_port_of_its_own(kind, prefill, shared_port):
    listening = {}
    for process in psutil.Process(prefill.peer.pid).children(recursive=True):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                listening[connection.laddr.port] = process.pid
    ports = range(shared_port, shared_port + kind.num_workers)
    assert len({listening[each] for each in ports}) == kind.num_workers


def test_what_fails_to_load_at_one_worker_is_computed_by_all(
    kind, prefill, decode, prompts, said, faulty_worker
):
    if kind.num_workers == 1:
        pytest.skip("it has one worker")
    asked = list(prompts.values())
    salt = f"failed, {decode.peer.pid}"
    prefill.generate(asked, max_tokens=1, salt=salt)
    loads = decode.count("transfers", "op=load")
    switch = faulty_worker.folder / "corrupt"
    switch.touch()
    answers = decode.generate(asked, salt=salt)
    switch.unlink()
    assert [answer.tokens for answer in answers] == said
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert decode.count("transfer_failures", "op=load") == len(asked), "at the one"
    assert decode.count("transfers", "op=load") - loads == len(asked), "at the other"
    assert [answer.tokens for answer in decode.generate(asked, salt=salt)] == said
