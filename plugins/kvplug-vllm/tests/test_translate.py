"""What vLLM's configuration says, in kvplug's words; and what is refused because it cannot be said."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplug import Config, ConfigError, UnsupportedError
from kvplug.engine import LayoutError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm import _custom_ops as custom_ops
    from vllm.config import KVTransferConfig
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVQuantMode,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from kvplug_vllm.releases.cache import declares_layout
    from kvplug_vllm.translate import (
        cache_of,
        config_of,
        frees_early,
        in_memory_order,
        model_of,
        parallelism_of,
    )

pytestmark = pytest.mark.smoke

FULL = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32)
LATENT = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
NEEDS_LAYOUTS = pytest.mark.skipif(
    not declares_layout(), reason=f"vLLM {vllm.__version__} does not declare the layout of its cache"
)


def cache_config(spec: Any = FULL, layout: str | None = "LBHNC", groups: int = 1) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=7,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"model.layers.{group}.attn", f"model.layers.{group}1.attn"], spec)
            for group in range(groups)
        ],
        **({"kv_cache_layout": layout} if declares_layout() else {}),
    )


def vllm_config(**more: Any) -> Any:
    """As much of a VllmConfig as is looked at."""
    hf = SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    parallel = {
        **dict.fromkeys(("rank", "data_parallel_index"), 0),
        **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), 1),
        **dict.fromkeys(("world_size", "tensor_parallel_size"), 1),
        "distributed_executor_backend": "mp",
    }
    model = {
        **dict.fromkeys(("revision", "quantization")),
        **dict.fromkeys(("max_model_len", "original_max_model_len"), 2048),
        "served_model_name": "smol",
        "model": "no/such-model",
        "model_weights": "",
        "hf_text_config": hf,
        "dtype": torch.float32,
        "enable_sleep_mode": False,
        "get_total_num_hidden_layers": lambda: 30,
        "get_total_num_kv_heads": lambda: 6,
        "get_layers_start_end_indices": lambda parallel: (10, 20),
    }
    return SimpleNamespace(
        kv_transfer_config=more.get("transfer") or transfer(),
        parallel_config=SimpleNamespace(**parallel | more.get("parallel", {})),
        model_config=SimpleNamespace(**model | more.get("model", {})),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=more.get("layers", {})),
    )


def transfer(**more: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="KvplugConnector", kv_role="kv_producer", kv_connector_extra_config=more
    )


# -- the configuration ------------------------------------------------------------------------------


def test_every_fault_of_the_extra_config_is_reported_at_once():
    given = {"conector": "lookup", "port": "many", "failure_policy": "recompute"}
    with pytest.raises(ConfigError) as e:
        config_of(vllm_config(transfer=transfer(**given)))
    assert len(e.value.faults) == 3
    assert "did you mean 'connector'" in str(e.value)
    assert "failure_policy: not a known key" in str(e.value)  # vLLM's kv_load_failure_policy decides


def test_each_data_parallel_rank_takes_ports_of_its_own_which_consumers_name_as_peers():
    def config(rank: int, **extra: Any) -> Config:
        parallel = {"data_parallel_index": rank, "world_size": 2}
        return config_of(vllm_config(transfer=transfer(**extra), parallel=parallel))

    producers = [config(rank, host="127.0.0.1", port=5000) for rank in range(3)]
    assert producers[2].control_address(1) == "127.0.0.1:5005"
    addresses = [producer.control_address() for producer in producers]
    assert addresses == ["127.0.0.1:5000", "127.0.0.1:5002", "127.0.0.1:5004"]
    for rank in (0, 3):
        assert config(rank, peers=addresses).peer_addresses == tuple(addresses)


# -- cache and layout ---------------------------------------------------------------------------------


@NEEDS_LAYOUTS
def test_the_layout_is_the_declared_one():
    for layout, axes in {
        "LBHNC": "BHTKD",
        "LBNHC": "BTHKD",
        "LHBNC": "HBTKD",
        "BLHNC": "BHTKD",
        "BLNHC": "BTHKD",
        "BHLNC": "BHTKD",
    }.items():
        (group,) = cache_of(vllm_config(), cache_config(layout=layout)).groups
        assert group.layout.axes == axes, layout
        assert group.layout.sizes == {"K": 2, "B": 7, "T": 32, "H": 3, "D": 64}
        assert group.layer_names == ("model.layers.0.attn", "model.layers.01.attn")


def test_latent_attention_has_one_vector_per_token():
    (group,) = cache_of(vllm_config(), cache_config(LATENT)).groups
    assert (group.layout.axes, group.layout.sizes) == ("BTD", {"B": 7, "T": 64, "D": 576})
    model = model_of(vllm_config(), cache_config(LATENT))
    assert (model.attention, model.num_kv_heads, model.head_size) == ("mla", 1, 576)


@NEEDS_LAYOUTS
def test_tensors_come_in_the_order_of_memory_and_their_strides_are_checked():
    memory = torch.arange(7 * 32 * 3 * 128, dtype=torch.float32)
    heads_inside = memory.view(7, 32, 3, 128).permute(0, 2, 1, 3)  # logical [B, H, N, C], LBNHC in memory
    layout = cache_of(vllm_config(), cache_config(layout="LBNHC")).groups[0].layout
    ours = in_memory_order(heads_inside, layout)
    layout.check(ours)
    assert ours.shape == (7, 32, 3, 128)
    assert ours.data_ptr() == memory.data_ptr()
    wrong = cache_of(vllm_config(), cache_config(layout="LBHNC")).groups[0].layout
    with pytest.raises(LayoutError, match="memory order"):
        wrong.check(in_memory_order(heads_inside, wrong))


def layer(backend: str, **more: Any) -> Any:
    """A layer in a worker's process, with the kernel of this name."""
    return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), **more)


def block_format(spec: Any, backend: str = "CPU_ATTN") -> str:
    layers = {"model.layers.0.attn": layer(backend)}
    config = vllm_config(layers=layers, model={"dtype": spec.dtype})
    (group,) = cache_of(config, cache_config(spec)).groups
    return group.layout.block_format


def test_elsewhere_than_on_cpus_the_block_format_names_the_release_and_the_kernel():
    release = ".".join(vllm.__version__.split(".")[:2])
    assert block_format(FULL, "SOME_ATTN") == f"vllm {release} SOME_ATTN"
    (group,) = cache_of(vllm_config(), cache_config()).groups
    assert group.layout.block_format == "vllm", "the scheduler's process knows no kernel"


def test_on_cpus_the_block_format_is_what_the_kernel_writes_whatever_the_release(monkeypatch):
    ours = block_format(FULL)
    isa = _get_attn_isa(torch.float32, 32, 64, "auto")
    assert ours.startswith(f"vllm CPU_ATTN {isa} ")
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    assert block_format(FULL) == ours
    if isa == "vec" and "avx512f" in Path("/proc/cpuinfo").read_text():
        assert ours == "vllm CPU_ATTN vec c2907f93fa48591f", "of all releases from 0.27.1 to 0.32.0"
    specs = [
        dataclasses.replace(FULL, block_size=tokens, head_size=size, head_size_v=size, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for tokens in (32, 64)
        for size in (64, 128)
    ]
    assert len(set(map(block_format, specs))) == len(specs)

    def write(key: Any, value: Any, keys: Any, values: Any, *rest: Any, **more: Any) -> None:
        write_before(key, value, keys, values, *rest, **more)
        keys[:, :, [0, 1]] = keys[:, :, [1, 0]]

    write_before = custom_ops.cpu_attn_reshape_and_cache
    monkeypatch.setattr(custom_ops, "cpu_attn_reshape_and_cache", write)
    assert block_format(FULL) != ours, "a kernel with another order under the same shape"


@pytest.mark.parametrize(
    "where",
    ["vllm.v1.attention.backends.cpu_attn._get_attn_isa", "vllm._custom_ops.cpu_attn_reshape_and_cache"],
)
def test_a_release_whose_kernel_is_called_otherwise_is_refused_with_what_to_do(where, monkeypatch):
    monkeypatch.delattr(where)
    with pytest.raises(UnsupportedError, match=rf"{where.rpartition('.')[2]}.*is tested with vLLM 0.27.1, "):
        block_format(FULL)


# -- several groups -----------------------------------------------------------------------------------

SLIDING = SlidingWindowSpec(
    block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32, sliding_window=128
)


def groups_of_specs(*specs: Any, **more: Any) -> KVCacheConfig:
    """A group of two layers for each spec; the layers of the last group come first in the model."""
    cache = cache_config()
    cache.kv_cache_groups = [
        KVCacheGroupSpec([f"layers.{10 - at}.attn", f"layers.{20 - at}.attn"], spec, **more)
        for at, spec in enumerate(specs)
    ]
    return cache


def test_layers_of_several_groups_are_named_in_the_order_of_the_model():
    given = groups_of_specs(SLIDING, FULL)
    cache = cache_of(vllm_config(), given)
    assert [group.window for group in cache.groups] == [128, None]
    assert cache.forward_order == ("layers.9.attn", "layers.10.attn", "layers.19.attn", "layers.20.attn")
    assert frees_early(cache)
    assert frees_early(cache_of(vllm_config(), cache_config(SLIDING))), "its blocks go"
    assert not frees_early(cache_of(vllm_config(), cache_config()))
    assert model_of(vllm_config(), given).window == 128


# -- what is refused ----------------------------------------------------------------------------------

QUANTISED = dataclasses.replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
BY_TOKEN = dataclasses.replace(QUANTISED, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
MAMBA = MambaSpec(block_size=32, shapes=((4, 8),), dtypes=(torch.float32,))
CHUNKS = ChunkedLocalAttentionSpec(
    block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32, attention_chunk_size=64
)
WIDE = dataclasses.replace(FULL, head_size=128, head_size_v=128)


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ([MAMBA], "MambaSpec: every token overwrites its recurrent state"),
        ([CHUNKS], "ChunkedLocalAttentionSpec: blocks are freed by chunks"),
        ([BY_TOKEN], "INT8_PER_TOKEN_HEAD is not supported: its scales differ between tokens"),
        ([dataclasses.replace(FULL, head_size_v=32)], "keys have 64 elements per head and values 32"),
        ([dataclasses.replace(FULL, attention_chunk_size=64)], "not plain keys and values"),
        ([SLIDING, WIDE], "blocks of the model's KV cache groups differ"),
        ([SLIDING, dataclasses.replace(FULL, dtype=torch.float16)], "KV cache groups differ"),
        ([SLIDING, MAMBA], "MambaSpec: "),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(specs, why):
    with pytest.raises(UnsupportedError, match=why):
        cache_of(vllm_config(), groups_of_specs(*specs))


@pytest.mark.parametrize(
    "name", ["tokens_per_state", "compress_ratio", "num_head_slots", "state_content_bytes"]
)
def test_blocks_that_a_release_gives_another_content_are_refused(name):
    if name not in MLAAttentionSpec.__dataclass_fields__:
        pytest.skip(f"vLLM {vllm.__version__} has no {name}")
    with pytest.raises(UnsupportedError, match=f"MLAAttentionSpec with {name} 4: .*not plain keys"):
        cache_of(vllm_config(), cache_config(dataclasses.replace(LATENT, **{name: 4})))


def test_settings_of_the_cache_that_cannot_be_served_are_refused():
    with pytest.raises(UnsupportedError, match=r"a draft model .* --disable-hybrid-kv-cache-manager"):
        cache_of(vllm_config(), groups_of_specs(SLIDING, FULL, is_eagle_group=True))
    with pytest.raises(UnsupportedError, match="without --enable-sleep-mode"):
        cache_of(vllm_config(model={"enable_sleep_mode": True}), cache_config())
    config = vllm_config()
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(UnsupportedError, match="--calculate-kv-scales"):
        cache_of(config, cache_config(QUANTISED))
    cache_of(config, cache_config())  # without a quantised cache it does nothing


def test_pages_of_other_scales_are_pages_of_another_format():
    def quantised(k_scale: float = 1.0, v_scale: float = 1.0, cache_dtype: str = "fp8") -> tuple[str, str]:
        """The block format and the model's quantisation, in a worker with these scales."""
        scales = {"_k_scale": torch.tensor(k_scale), "_v_scale": torch.tensor(v_scale)}
        layers = dict.fromkeys(("model.layers.0.attn", "model.layers.01.attn"), layer("SOME_ATTN", **scales))
        config = vllm_config(layers=layers)
        config.cache_config.cache_dtype = cache_dtype
        (group,) = cache_of(config, cache_config(QUANTISED)).groups
        return group.layout.block_format, model_of(config, cache_config(QUANTISED)).quantisation

    ours, quantisation = quantised()
    assert quantisation == "fp8_e4m3"
    assert quantised(cache_dtype="fp8_e4m3") == (ours, quantisation)
    assert quantised(cache_dtype="fp8_e5m2") == (ours, "fp8_e5m2")
    assert len({quantised(*scales)[0] for scales in [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5)]}) == 3
    (group,) = cache_of(vllm_config(), cache_config(QUANTISED)).groups
    assert group.layout.block_format == "vllm", "the scheduler's process has no layers"
    assert model_of(vllm_config(), cache_config()).quantisation == ""


# -- model and parallelism ----------------------------------------------------------------------------


def test_the_model_is_described_by_what_decides_its_kv():
    model = model_of(vllm_config(), cache_config())
    assert (model.num_layers, model.num_kv_heads, model.head_size, model.dtype) == (30, 6, 64, "float32")
    assert "rope_theta" in model.rope
    assert model.window is None
    assert model.weights == "", "nothing is known of a model that is not here"
    longer = model_of(vllm_config(model={"max_model_len": 1 << 20}), cache_config())
    assert longer == model, "the maximal length makes no difference to most models"


def test_factors_that_vllm_chooses_by_its_maximal_length_make_a_difference():
    """A "longrope" of vLLM's turns all keys by the long factors if any sequence could need them."""
    from transformers import Phi3Config
    from vllm.transformers_utils.config import patch_rope_parameters

    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    phi3 = Phi3Config(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={**scaling, "rope_theta": 1e4, "original_max_position_embeddings": 4096},
    )
    patch_rope_parameters(phi3)

    def rope(max_model_len: int, given: int | None = None) -> str:
        lengths = {"max_model_len": max_model_len, "original_max_model_len": given or max_model_len}
        return model_of(vllm_config(model={"hf_text_config": phi3, **lengths}), cache_config()).rope

    assert rope(2048) == rope(4096)
    assert rope(4097) == rope(131072)
    assert rope(4096) != rope(4097)
    assert rope(3000, given=-1) == rope(131072), "built for all of its length, and shortened to fit"
    assert rope(4096)[:60] != rope(4097)[:60], "and a refusal shows it, though there are many factors"


def test_where_a_worker_stands():
    parallel = {"rank": 5, "world_size": 8, "tensor_parallel_size": 4}
    found = parallelism_of(vllm_config(parallel=parallel))
    assert (found.worker_rank, found.num_workers) == (5, 8)
    assert (found.tensor_rank, found.tensor_size) == (1, 4)
    assert (found.first_layer, found.end_layer) == (10, 20)


def test_ranks_that_cannot_be_served_are_refused():
    launched = {"distributed_executor_backend": "external_launcher"}
    assert parallelism_of(vllm_config(parallel=launched)).num_workers == 1
    for parallel, why in (
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"enable_fault_tolerance": True}, "with enable_fault_tolerance vLLM repeats"),
        ({**launched, "world_size": 2}, "external launcher"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            parallelism_of(vllm_config(parallel=parallel))
