"""Prefill in one vLLM engine, decode in another, with all kinds of models: the tokens of one engine alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvplug_testing.peers import ChildError
from vllm_engines import transfer_config
from vllm_servers import new_salt

with warnings.catch_warnings():  # deprecated Python in vLLM
    warnings.simplefilter("ignore")
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvplug_vllm.releases.base import FAILS_BY_REQUEST

pytestmark = pytest.mark.timeout(900)

PLAIN = "the demo's"
KINDS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    # vLLM 0.32's own kernel for rotary embeddings on CPUs computes other keys for other batches here. The
    # kernel for CPUs allows one size of a block only.
    "latent": {"compilation_config": {"custom_ops": ["none"]}, "block_size": None},
    "fp8": {"kv_cache_dtype": "fp8"},
    # Before 0.30 one group for all layers, which vLLM's kernel computes wrong where it splits a request.
    "sliding": {"env": {"VLLM_CPU_ATTN_SPLIT_KV": "0"}},
    "windowed": {},
}
"""Settings of each engine, by kind of model."""
LATENT_BLOCK = 16

NOT_RUN = {}
"""Why a kind of model does not run in this release."""
if not FAILS_BY_REQUEST:
    NOT_RUN["windowed"] = "kvplug refuses it: this release frees blocks of the only group that it makes"
if vllm.__version__.startswith("0.28."):
    NOT_RUN["latent"] = "vLLM 0.28 fails in an import of its own, without kvplug as well"
if vllm.__version__.startswith("0.27."):
    NOT_RUN["latent"] = "vLLM 0.27 has no latent attention on CPUs"
if not {"avx512f", "amx_tile"} & {*Path("/proc/cpuinfo").read_text().split()}:
    NOT_RUN["fp8"] = "vLLM needs AVX-512 or AMX for a cache of fp8 on CPUs, and this processor has neither"


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.smoke] * (kind == PLAIN)) for kind in KINDS]
)
def kind(request: pytest.FixtureRequest) -> str:
    if reason := NOT_RUN.get(request.param):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="module")
def begin(kind: str, start, random_model):
    """Starts an engine with the model of that kind."""
    settings = {"block_size": 32, **KINDS[kind]}
    if settings["block_size"] is None:
        del settings["block_size"]
    if kind != PLAIN:
        settings["model"] = random_model("llama" if kind == "fp8" else kind)
    return lambda transfer=None, **more: start(transfer, **settings, **more)


@pytest.fixture(scope="module")
def expected(request, kind: str, begin, prompts) -> dict[int, tuple[int, ...]]:
    if kind == PLAIN:
        return dict(request.getfixturevalue("alone"))
    with begin() as only:
        return {length: only.one(prompt).tokens for length, prompt in prompts.items()}


@pytest.fixture
def pair(begin, port: int):
    """``pair(producer, consumer, **extra)``: engines that prefill and decode, with these settings and further
    keys of their kv-transfer-configs.
    """

    @contextmanager
    def run(producer: Any = (), consumer: Any = (), **extra: Any) -> Iterator[tuple[Any, Any]]:
        with (
            begin(transfer_config("kv_producer", port, **extra), **dict(producer)) as prefill,
            begin(transfer_config("kv_consumer", port, **extra), **dict(consumer)) as decode,
        ):
            yield prefill, decode

    return run


def test_tokens_are_those_of_one_engine_alone(kind, pair, prompts, expected):
    block = LATENT_BLOCK if kind == "latent" else 32
    whole = {length: (length - 1) // block * block for length in prompts}
    with pair() as (prefill, decode):
        for length, prompt in prompts.items():
            assert prefill.one(prompt, max_tokens=1).tokens == expected[length][:1]
            answer = decode.one(prompt)
            assert (answer.num_cached, answer.tokens) == (whole[length], expected[length])
        # All at once, in chunks of a step, under another salt: nothing of the first round may serve.
        cold = decode.one(prompts[700], salt="another tenant")
        assert (cold.tokens, cold.num_cached) == (expected[700], 0)
        prefill.generate(list(prompts.values()), max_tokens=1, salt="another tenant")
        answers = decode.generate(list(prompts.values()), salt="another tenant")
        assert [answer.tokens for answer in answers] == list(expected.values())
        assert all(answer.num_cached > 0 for answer in answers)
        loads = decode.count("operations", "op=load")
        assert loads == 7 or kind != PLAIN, "four, and three: one of the second was cached by vLLM itself"
        if hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"):  # it counts by source
            sources = decode.ask("cached_by_source")
            assert sources["p2p"] >= sum(whole.values())


def test_corrupted_kv_gives_other_tokens(pair, prompts, expected):
    """The control: were the KV not used, or recomputed in silence, this would find the same tokens."""
    with pair({"setup": "faults:corrupt_what_is_sent"}, integrity="off") as (prefill, decode):
        prefill.one(prompts[700], max_tokens=1)
        answer = decode.one(prompts[700])
        assert answer.num_cached > 0
        assert answer.tokens != expected[700]


def test_a_group_that_vllm_computes_wrong_is_refused(start, random_model, port):
    alone = {"block_size": 32, "disable_hybrid_kv_cache_manager": True}
    with (
        pytest.raises(ChildError, match=r"computes such a group wrong .* Set VLLM_CPU_ATTN_SPLIT_KV=0"),
        start(transfer_config("kv_producer", port), model=random_model("sliding"), **alone),
    ):
        pass


# -- loads that fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sliding"], indirect=True)
@pytest.mark.parametrize("groups", [True, False], ids=["several groups", "one group"])
def test_a_failed_load_of_groups_is_recomputed(groups, pair, prompts, expected):
    """Several groups are reported by request. Pages of one group are those of several."""
    consumer = {} if groups else {"disable_hybrid_kv_cache_manager": True}
    producer = {"setup": "faults:switchable"}
    with pair(producer, consumer, kv_load_failure_policy="recompute") as (prefill, decode):
        prefill.one(prompts[700], max_tokens=1)
        answer = decode.one(prompts[700])
        assert (answer.tokens, answer.num_cached) == (expected[700], 672)
        prefill.ask("faults:switch", corrupt=True)
        prefill.one(prompts[1500], max_tokens=1)
        assert decode.one(prompts[1500]).tokens == expected[1500]
        assert decode.count("failures", "op=load", "reason=corrupt") == 1


@pytest.mark.parametrize("kind", [PLAIN], indirect=True)
def test_a_failed_load_is_an_error_by_policy(pair, prompts, expected):
    producer = {"setup": "faults:corrupt_what_is_sent"}
    with pair(producer, kv_load_failure_policy="fail") as (prefill, decode):
        while "could not be loaded: corrupt" not in decode.peer.stderr:  # it may not have met its producer
            salt = new_salt()
            prefill.one(prompts[700], max_tokens=1, salt=salt)
            answer = decode.one(prompts[700], salt=salt)
        assert answer.finish_reason == "error"
        assert decode.one(prompts[300]).tokens == expected[300], "it goes on serving"
