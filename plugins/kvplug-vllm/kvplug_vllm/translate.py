"""Translates vLLM's configuration into kvplug's: config, model, cache, parallelism."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kvplug import Config, ConnectorInfo, UnsupportedError
from kvplug.engine import CacheGroup, KVCacheConfig, KVLayout, LayoutError, ModelInfo, Parallelism
from kvplug_vllm.kinds import (
    check_groups,
    frees_blocks,
    is_latent,
    quantisation_of,
    scales_of,
    spec_of,
    window_of,
)
from kvplug_vllm.plugin import NAME
from kvplug_vllm.releases.block_format import block_format_of
from kvplug_vllm.releases.cache import as_logical, groups_of, order_of
from kvplug_vllm.weights import fingerprint_of

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig as VllmKVCacheConfig


def config_of(vllm_config: VllmConfig) -> Config:
    """The connector's configuration: ``--kv-transfer-config``, with kvplug's keys in its extra config.

    Each data-parallel rank is an engine. On one address, its ports follow those of the previous rank.

    Raises:
        ConfigError: the configuration is wrong; lists every fault.
    """
    given = vllm_config.kv_transfer_config
    assert given is not None
    config = Config.from_dict(
        {field.name: getattr(given, field.name) for field in dataclasses.fields(given)},
        source="kv-transfer-config",
    )
    parallel = vllm_config.parallel_config
    offset = parallel.data_parallel_index * parallel.world_size
    return attrs.evolve(config, port_offset=config.port_offset + offset) if offset else config


def config_of_extra(extra: Mapping[str, Any]) -> Config:
    """The configuration from the extra config alone, without vLLM's role.

    Raises:
        ConfigError: as :func:`config_of`.
    """
    return Config.from_dict(
        {"kv_connector": NAME, "kv_connector_extra_config": extra}, source="kv-transfer-config"
    )


def parallelism_of(vllm_config: VllmConfig) -> Parallelism:
    """The ranks of this process's worker in its engine; for the scheduler side, the numbers of ranks.

    Raises:
        UnsupportedError: tokens of one request are split over ranks (context parallelism), or ranks
            schedule by themselves, or vLLM repeats the reports of a failed step.
    """
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise UnsupportedError(
            "under an external launcher each rank schedules by itself and knows only its own loads, so the"
            " ranks would diverge; let vLLM start its workers (distributed_executor_backend 'mp' or 'ray')"
        )
    if getattr(parallel, "enable_fault_tolerance", False):
        raise UnsupportedError(
            "with enable_fault_tolerance vLLM repeats the workers' reports of a failed step in the next one,"
            " but kvplug expects one report per worker and step; start this server without"
            " --enable-fault-tolerance"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise UnsupportedError(
                f"{name} is {getattr(parallel, name)}: then a rank holds only some tokens of a block, but"
                " kvplug moves whole blocks; set it to 1"
            )
    first, end = vllm_config.model_config.get_layers_start_end_indices(parallel)
    return Parallelism(
        worker_rank=parallel.rank,
        num_workers=parallel.world_size,
        tensor_rank=parallel.rank % parallel.tensor_parallel_size,
        tensor_size=parallel.tensor_parallel_size,
        first_layer=first,
        end_layer=end,
    )


def can_rewind(vllm_config: VllmConfig) -> bool:
    """Whether a running request can be made to compute tokens that vLLM already counts as computed.

    It cannot if the next step is planned before the failure is known (asynchronous scheduling, pipeline
    parallelism), nor with vLLM's second model runner, which sets the number of computed tokens on its device
    when the request starts, and then only increases it (0.32).
    """
    return vllm_config.max_concurrent_batches == 1 and not vllm_config.use_v2_model_runner


def replays_steps(vllm_config: VllmConfig) -> bool:
    """Whether vLLM replays whole captured steps (full CUDA graphs), without calls between layers."""
    return bool(vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs())


def model_of(vllm_config: VllmConfig, cache: VllmKVCacheConfig) -> ModelInfo:
    """The properties of the model that its KV depends on.

    Raises:
        UnsupportedError: as :func:`cache_of`.
    """
    model = vllm_config.model_config
    specs = [spec_of(group.kv_cache_spec) for group in groups_of(cache)]
    spec, windows = specs[0], {window for each in specs if (window := window_of(each)) is not None}
    return ModelInfo(
        name=model.served_model_name or model.model,
        attention="mla" if is_latent(spec) else "mha",
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=1 if is_latent(spec) else model.get_total_num_kv_heads(),
        head_size=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        rope=_positions_of(model),
        window=min(windows, default=None),
        quantisation=quantisation_of(vllm_config, spec),
        weights=fingerprint_of(vllm_config),
    )


def _positions_of(model: ModelConfig) -> str:
    """The model's position embedding, including the factors that vLLM chooses at startup."""
    from vllm.transformers_utils.config import is_rope_parameters_nested

    config = model.hf_text_config
    positions = ModelInfo.positions_of(config)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if is_rope_parameters_nested(rope) else (rope,):
        if parameters.get("rope_type") == "longrope":
            limit = parameters["original_max_position_embeddings"]
            is_fitted = model.original_max_model_len == -1  # reduced after vLLM chose the model's maximum
            is_long = is_fitted or model.max_model_len > limit
            length = f"{'above' if is_long else 'up to'} {limit}"
            return f"factors of --max-model-len {length}: {positions}"
    return positions


def cache_of(vllm_config: VllmConfig, cache: VllmKVCacheConfig) -> KVCacheConfig:
    """The paged cache, as vLLM declares it: sizes from each group's spec, memory order from its layout.

    vLLM does not declare how an attention kernel orders the inside of a block (on CPUs keys are transposed,
    under the same shape): see :mod:`kvplug_vllm.releases.block_format`.

    Raises:
        UnsupportedError: a block does not hold the keys and values of each of its tokens, or vLLM may unmap
            the cache (sleep mode).
        ConfigError: vLLM does not declare the memory order of its cache.
    """
    if vllm_config.model_config.enable_sleep_mode:
        raise UnsupportedError(
            "sleep mode unmaps the KV cache, which a connector's threads may read or have registered: start"
            " this server without --enable-sleep-mode"
        )
    vllm_groups = groups_of(cache)
    if not vllm_groups:
        raise UnsupportedError("this model has no KV cache to move")
    specs = [spec_of(group.kv_cache_spec) for group in vllm_groups]
    check_groups(cache, specs)
    layers = sorted((name for group in vllm_groups for name in group.layer_names), key=_place_of)
    order = order_of(cache, lambda: ConnectorInfo(config_of(vllm_config)).required_layout)
    scales = scales_of(vllm_config, specs[0], layers)
    groups = tuple(
        CacheGroup(
            layer_names=tuple(group.layer_names),
            layout=_layout_of(
                spec,
                order,
                cache.num_blocks,
                block_format_of(vllm_config, group.layer_names[0], spec) + scales,
            ),
            window=window_of(spec) if frees_blocks(spec) else None,
        )
        for group, spec in zip(vllm_groups, specs, strict=True)
    )
    return KVCacheConfig(groups=groups, num_blocks=cache.num_blocks, forward_order=tuple(layers))


def frees_early(cache: KVCacheConfig) -> bool:
    """Whether a running request may lose blocks, or has blocks in several groups.

    Failed loads are then reported by request (``failed_recving``): from blocks alone, vLLM could not tell
    where the request has to resume.
    """
    return len(cache.groups) > 1 or any(group.window is not None for group in cache.groups)


def _place_of(layer_name: str) -> tuple[list[int], str]:
    """A sort key: layers in the order of the forward pass, in every process and whatever their groups."""
    return [int(number) for number in re.findall(r"\d+", layer_name)], layer_name


def in_memory_order(tensor: Tensor, layout: KVLayout) -> Tensor:
    """A view of vLLM's logical ``[B, H, N, C]`` tensor with its dimensions in the layout's order.

    Raises:
        LayoutError: vLLM has split its blocks into smaller ones for its kernels.
    """
    if layout.num_blocks is not None and tensor.shape[0] > layout.num_blocks:
        raise LayoutError(
            f"vLLM's kernels work on {tensor.shape[0]} blocks, but its scheduler counts {layout.num_blocks}:"
            f" choose a --block-size that they do not split (below {layout.block_size})"
        )
    tensor, letters = as_logical(tensor), "BHTD"
    if "H" not in layout.axes:
        tensor, letters = tensor.squeeze(1), "BTD"
    return tensor.permute([letters.index(letter) for letter in layout.axes if letter != "K"])


def _layout_of(spec: AttentionSpec, order: str, num_blocks: int, block_format: str) -> KVLayout:
    sizes = {"B": num_blocks, "T": spec.block_size, "D": spec.head_size}
    if is_latent(spec):
        return KVLayout(order.replace("H", ""), sizes, block_format=block_format)
    sizes |= {"K": 2, "H": spec.num_kv_heads}
    return KVLayout(order.replace("D", "KD"), sizes, block_format=block_format)
