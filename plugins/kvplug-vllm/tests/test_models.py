"""Models of other kinds than plain attention, each really run: prefill in one engine, decode in another."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from kvplug_testing.peers import ChildError

with warnings.catch_warnings():  # deprecated Python in vLLM
    warnings.simplefilter("ignore")
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvplug_vllm.releases.base import FAILS_BY_REQUEST

pytestmark = pytest.mark.timeout(900)

FAULTS = f"{Path(__file__).parent}/faults.py"
INSIDE = f"{Path(__file__).parent}/inside.py"

KINDS: dict[str, dict[str, Any]] = {
    # vLLM 0.32's own kernel for rotary embeddings on CPUs computes other keys for other batches here.
    "latent": {"compilation_config": {"custom_ops": ["none"]}},
    "fp8": {"kv_cache_dtype": "fp8", "block_size": 32},
    # Before 0.30 one group for all layers, which vLLM's kernel computes wrong where it splits a request.
    "sliding": {"block_size": 32, "env": {"VLLM_CPU_ATTN_SPLIT_KV": "0"}},
    "windowed": {"block_size": 32},
}
"""Settings of each engine, by kind of model."""
BLOCKS = {"latent": 16}
"""Tokens in a block, where the kernel for CPUs allows one size only."""


NOT_RUN = {}
"""Why a kind of model does not run in this release."""
if not FAILS_BY_REQUEST:
    NOT_RUN["windowed"] = "kvplug refuses it: this release frees blocks of the only group that it makes"
if vllm.__version__.startswith("0.28."):
    NOT_RUN["latent"] = "vLLM 0.28 fails in an import of its own, without kvplug as well"
if vllm.__version__.startswith("0.27."):
    NOT_RUN["latent"] = "vLLM 0.27 has no latent attention on CPUs"


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    if reason := NOT_RUN.get(request.param):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="module")
def begin(kind: str, start: Any, random_model: Any) -> Any:
    """Starts an engine with the model of that kind."""
    return lambda transfer=None, **more: start(
        transfer, model=random_model("llama" if kind == "fp8" else kind), **KINDS[kind], **more
    )


@pytest.fixture(scope="module")
def expected(begin: Any, prompts: Any) -> dict[int, tuple[int, ...]]:
    with begin() as only:
        return {length: only.one(prompt).tokens for length, prompt in prompts.items()}


def test_tokens_are_those_of_one_engine_alone(
    kind: str, begin: Any, config_for: Any, prompts: Any, expected: Any, port: int
) -> None:
    block = BLOCKS.get(kind, 32)
    with begin(config_for("kv_producer", port)) as prefill, begin(config_for("kv_consumer", port)) as decode:
        for length, prompt in prompts.items():
            assert prefill.one(prompt, max_tokens=1).tokens == expected[length][:1]
            answer = decode.one(prompt)
            assert answer.num_cached == (length - 1) // block * block
            assert answer.tokens == expected[length]
        # All at once, in chunks of a step.
        prefill.generate(list(prompts.values()), max_tokens=1, salt="another tenant")
        answers = decode.generate(list(prompts.values()), salt="another tenant")
        assert [answer.tokens for answer in answers] == list(expected.values())
        assert all(answer.num_cached > 0 for answer in answers)
        if not hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"):
            return  # this release does not count by source
        sources = decode.ask("call", where=f"{INSIDE}:cached_by_source")
        assert sources["p2p"] >= sum((length - 1) // block * block for length in prompts)


def test_a_group_that_vllm_computes_wrong_is_refused(
    start: Any, random_model: Any, config_for: Any, port: int
) -> None:
    alone = {"block_size": 32, "disable_hybrid_kv_cache_manager": True}
    with (
        pytest.raises(ChildError, match=r"computes such a group wrong .* Set VLLM_CPU_ATTN_SPLIT_KV=0"),
        start(config_for("kv_producer", port), model=random_model("sliding"), **alone),
    ):
        pass


def test_corrupted_kv_gives_other_tokens(
    begin: Any, config_for: Any, prompts: Any, expected: Any, port: int
) -> None:
    """The control: were the KV not used, or recomputed in silence, this would find the same tokens."""
    off = {"integrity": "off"}
    with (
        begin(config_for("kv_producer", port, **off), setup=f"{FAULTS}:corrupt_what_is_sent") as prefill,
        begin(config_for("kv_consumer", port, **off)) as decode,
    ):
        prefill.one(prompts[700], max_tokens=1)
        answer = decode.one(prompts[700])
        assert answer.num_cached > 0
        assert answer.tokens != expected[700]


@pytest.mark.parametrize("kind", ["sliding"], indirect=True)
@pytest.mark.parametrize("groups", [True, False], ids=["several groups", "one group"])
def test_a_failed_load_is_recomputed(
    groups: bool, begin: Any, config_for: Any, prompts: Any, expected: Any, port: int
) -> None:
    """Several groups are told by request. Pages of one group are those of several."""
    alone = {} if groups else {"disable_hybrid_kv_cache_manager": True}
    consumer = config_for("kv_consumer", port, kv_load_failure_policy="recompute")
    with (
        begin(config_for("kv_producer", port), setup=f"{FAULTS}:switchable") as prefill,
        begin(consumer, setup=f"{FAULTS}:switchable", **alone) as decode,
    ):
        prefill.one(prompts[700], max_tokens=1)
        answer = decode.one(prompts[700])
        assert (answer.tokens, answer.num_cached) == (expected[700], 672)
        prefill.ask("call", where=f"{FAULTS}:switch", corrupt=True)
        prefill.one(prompts[1500], max_tokens=1)
        answer = decode.one(prompts[1500])
        assert answer.tokens == expected[1500]
        failed = {name: value for name, value in decode.metrics().items() if "op=load,reason=corrupt" in name}
        assert sum(failed.values()) == 1
