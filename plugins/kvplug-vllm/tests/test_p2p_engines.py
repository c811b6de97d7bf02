"""Connector "p2p" between vLLM's engines: groups of layers, a sibling, another release, several workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import vllm

from kvplug_testing.waits import until
from test_children import multi
from vllm_engines import MULTIPROCESS, transfer_config
from vllm_servers import REQUEST_S, new_salt

pytestmark = pytest.mark.timeout(900)

PATIENT = {"p2p": {"wait_timeout_s": 60.0, "stall_timeout_s": 60.0}}
NO_READER = {"do_remote_decode": False}


def p2p(role: str, port: int, **extra: Any) -> dict[str, Any]:
    return transfer_config(role, port, connector="p2p", options=PATIENT, **extra)


@pytest.fixture
def begin(start: Any, random_model: Any) -> Any:
    """``begin(transfer, env, **settings)``: an engine with a small random model."""

    def begin_engine(transfer: Any, env: Any = (), *, kind: str = "llama", **settings: Any) -> Any:
        return start(transfer, model=random_model(kind), env=dict(env), block_size=32, **settings)

    return begin_engine


def step(prefill: Any, prompt: list[int]) -> None:
    """An engine without a process of its own takes none after its last request."""
    prefill.one(prompt[:4], max_tokens=1, params=NO_READER)


def handed_off(prefill: Any, decode: Any, prompt: list[int]) -> Any:
    """Decode's answer from prefill's blocks; the tokens are those that decode computes alone."""
    alone = decode.one(prompt, salt=new_salt()).tokens
    salt = new_salt()
    first = prefill.one(prompt, salt=salt, max_tokens=1)
    assert first.params is not None
    step(prefill, prompt)
    answer = decode.one(prompt, salt=salt, params=dict(first.params))
    assert answer.tokens == alone
    return answer


def all_handed_off(prefill: Any, decode: Any, prompts: Mapping[int, list[int]], unit: int = 32) -> None:
    """Whole units of each prompt are pulled, but for its last token."""
    for prompt in prompts.values():
        handed_off(prefill, decode, prompt)
    pulled = sum((length - 1) // unit * unit for length in prompts)
    assert decode.counter("external_prefix_cache_hits") == pulled


def gives_back(prefill: Any, prompt: list[int]) -> None:
    """All blocks: in its next step."""

    def is_free() -> bool:
        step(prefill, prompt)
        return bool(prefill.state()["used_blocks"] == 0)

    until(is_free, REQUEST_S, "blocks that are given back")


@pytest.mark.parametrize("kind", ["sliding", "windowed"])
def test_blocks_of_windows_are_pulled_where_the_window_needs_them(kind, begin, prompts, port):
    env = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}
    with (
        begin(p2p("kv_producer", port), env, kind=kind) as prefill,
        begin(p2p("kv_consumer", port), env, kind=kind) as decode,
    ):
        all_handed_off(prefill, decode, prompts, unit=1)
        gives_back(prefill, prompts[300])


def test_beside_lookup_a_prompt_is_handed_off_and_a_prefix_comes_from_the_store(begin, free_port, prompts):
    ports = free_port(), free_port()

    def children(role: str) -> dict[str, Any]:
        return multi(p2p(role, ports[0]), transfer_config(role, ports[1]))

    with begin(children("kv_producer")) as prefill, begin(children("kv_consumer")) as decode:
        all_handed_off(prefill, decode, prompts)
        salt = new_salt()
        prefill.one(prompts[300], salt=salt, max_tokens=1, params=NO_READER)
        longer = prompts[300] + prompts[100]
        alone = decode.one(longer, salt=new_salt()).tokens
        answer = decode.one(longer, salt=salt)
        assert (answer.tokens, answer.num_cached) == (alone, 288)
        gives_back(prefill, prompts[300])
        assert decode.state()["used_blocks"] == 0
        assert prefill.count("operations", "op=save") >= 2 * len(prompts), "each prompt by both"


def test_a_reference_of_an_earlier_start_is_a_miss_whatever_the_policy(begin, prompts, port):
    """Its request is computed: ``kv_load_failure_policy`` is for loads that were promised."""
    prompt, salt = prompts[300], new_salt()

    def producer() -> Any:
        return begin(p2p("kv_producer", port, engine_id="prefill"))

    def is_met(prefill: Any, decode: Any) -> bool:
        loads = decode.count("operations", "op=load")
        handed_off(prefill, decode, prompt)
        return bool(decode.count("operations", "op=load") > loads)

    with (
        begin(p2p("kv_consumer", port, kv_load_failure_policy="fail")) as first,
        begin(p2p("kv_consumer", port, kv_load_failure_policy="recompute")) as second,
    ):
        with producer() as prefill:
            stale = prefill.one(prompt, salt=salt, max_tokens=1).params
        with producer() as prefill:
            for decode in (first, second):
                until(lambda decode=decode: is_met(prefill, decode), REQUEST_S, "a pull from the next start")
                alone = decode.one(prompt, salt=new_salt())
                answer = decode.one(prompt, salt=salt, params=stale)
                assert (answer.tokens, answer.finish_reason) == (alone.tokens, "length")
                assert decode.count("failures", "op=match", "reason=forged") == 1
                assert decode.count("failures", "op=load") == 0


@pytest.mark.parametrize("old_role", ["kv_producer", "kv_consumer"])
def test_between_two_releases(old_role, pytestconfig, begin, prompts, port):
    folder = pytestconfig.getoption("other_vllm")
    if not folder:
        pytest.skip("no other release of vLLM is given (--other-vllm FOLDER)")
    assert (Path(folder) / "vllm").is_dir(), f"{folder} has no vLLM"
    other = {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}
    envs = {role: other if role == old_role else {} for role in ("kv_producer", "kv_consumer")}
    prefills, decodes = (begin(p2p(role, port), env) for role, env in envs.items())
    with prefills as prefill, decodes as decode:
        old, new = (prefill, decode) if old_role == "kv_producer" else (decode, prefill)
        assert new.ask("version") == vllm.__version__ != old.ask("version")
        all_handed_off(prefill, decode, prompts)
        gives_back(prefill, prompts[300])


def test_with_as_many_workers_each_pulls_its_heads_and_otherwise_the_size_is_refused(begin, prompts, port):
    """vLLM's kernel orders the inside of a block in its own way, so heads cannot be divided."""
    unbound = {**MULTIPROCESS, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    def workers(role: str, size: int) -> Any:
        how = {"tensor_parallel_size": size, "distributed_executor_backend": "mp"}
        return begin(p2p(role, port), unbound, **how)

    with workers("kv_producer", 2) as prefill:
        with workers("kv_consumer", 2) as decode:
            all_handed_off(prefill, decode, prompts)
            assert decode.count("operations", "op=load") == 2 * len(prompts)
        with workers("kv_consumer", 1) as decode:
            handed_off(prefill, decode, prompts[300])
            assert decode.count("failures", "op=match", "reason=refused") == 1
            assert decode.counter("external_prefix_cache_hits") == 0
            refusal = (
                "tensor_parallel_size: ours 1, theirs 2; split the heads over the same number of workers"
            )
            assert refusal in decode.peer.stderr
