"""The supported kinds of KV cache, and why the others are not supported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvplug import UnsupportedError
from kvplug_vllm.releases.cache import groups_of, spec_of_all
from kvplug_vllm.releases.specs import extras_of
from kvplug_vllm.releases.windows import check_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

_WHY_NOT = {
    "MambaSpec": "every token overwrites its recurrent state, which a page of tokens does not contain",
    "ChunkedLocalAttentionSpec": "blocks are freed by chunks, not by a sliding window",
    "SlidingWindowMLASpec": "several tokens share one state of compressed latent attention",
    "CrossAttentionSpec": "its KV belongs to an encoder's input, not to the prompt's tokens",
    "EncoderOnlyAttentionSpec": "it keeps no KV between steps",
    "SinkFullAttentionSpec": "its blocks begin with attention sinks, which are not tokens",
    "RSWASpec": "blocks in the middle of a request are freed while it runs",
    "CircularBufferSpec": "its blocks are a ring that a running request overwrites",
    "HiddenStateCacheSpec": "its blocks are hidden states",
}
"""Reasons by the name of vLLM's class, since not every release has the class."""


def spec_of(spec: KVCacheSpec) -> AttentionSpec:
    """The spec, if its blocks are keys and values (or latents) of ``block_size`` tokens.

    Raises:
        UnsupportedError: they are something else; the message names the kind and the reason.
    """
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVQuantMode,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = set(spec.kv_cache_specs.values())
        if len(kinds) > 1:
            raise UnsupportedError(f"layers of one group have {len(kinds)} kinds of KV cache, not one")
        spec = spec_of_all(spec)
    name = type(spec).__name__
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        why = _WHY_NOT.get(name, "kvplug-vllm does not know this kind")
        raise UnsupportedError(
            f"{name}: {why}; kvplug moves the KV of full attention, of sliding windows and of latent"
            " attention. Start this model without a connector"
        )
    if spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        raise UnsupportedError(
            f"a KV cache quantised as {spec.kv_quant_mode.name} is not supported: its scales differ between"
            " tokens, and vLLM does not declare their place. Set --kv-cache-dtype to fp8, fp8_e5m2 or auto"
        )
    if extras := extras_of(spec):
        raise UnsupportedError(
            f"{name} with {extras}: its blocks are not plain keys and values of each token; start this model"
            " without a connector"
        )
    if not is_latent(spec) and spec.head_size_v != spec.head_size:
        raise UnsupportedError(
            f"keys have {spec.head_size} elements per head and values {spec.head_size_v}; kvplug requires"
            " equal sizes"
        )
    return spec


def is_latent(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return isinstance(spec, MLAAttentionSpec)


def frees_blocks(spec: Any) -> bool:
    """Whether vLLM frees blocks that have left the layer's window while the request runs."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return isinstance(spec, SlidingWindowSpec)


def window_of(spec: Any) -> int | None:
    """The layer's window in tokens, whether blocks outside it are freed or not."""
    window: int | None = getattr(spec, "sliding_window", None)
    return window


def check_groups(cache: KVCacheConfig, specs: Sequence[AttentionSpec]) -> None:
    """Check that the groups can be moved together.

    Raises:
        UnsupportedError: they cannot; the message says why, and what to change.
    """
    advice = "start this server with --disable-hybrid-kv-cache-manager, or without a connector"
    if len(specs) != len(cache.kv_cache_groups):
        raise UnsupportedError(
            f"{len(cache.kv_cache_groups) - len(specs)} of the {len(cache.kv_cache_groups)} KV cache groups"
            " are copies that vLLM does not transfer (HiSparse), and kvplug cannot load without them; start"
            " this server without a connector"
        )
    if len(specs) == 1 and not frees_blocks(specs[0]):
        check_window(specs[0])
        return
    if any(getattr(group, "is_eagle_group", False) for group in groups_of(cache)):
        raise UnsupportedError(
            f"a draft model beside layers with a window reads tokens after those of a page; {advice}"
        )
    shapes = {
        (is_latent(spec), spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype, spec.kv_quant_mode)
        for spec in specs
    }
    if len(shapes) > 1:
        sizes = ", ".join(
            f"{type(spec).__name__} with {spec.block_size} tokens, {spec.num_kv_heads} heads of"
            f" {spec.head_size} {spec.dtype}"
            for spec in dict.fromkeys(specs)
        )
        raise UnsupportedError(
            f"blocks of the model's KV cache groups differ ({sizes}), but a page has the layers of all"
            f" groups; {advice}"
        )


# -- quantised caches -------------------------------------------------------------------------------


def quantisation_of(vllm_config: VllmConfig, spec: AttentionSpec) -> str:
    """How the cache is quantised; empty if it is not. Its scales are in :func:`scales_of`.

    Raises:
        UnsupportedError: its scales are calculated while it runs.
    """
    from vllm.v1.kv_cache_interface import KVQuantMode

    if spec.kv_quant_mode == KVQuantMode.NONE:
        return ""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError(
            "--calculate-kv-scales: each server would calculate scales of its own, and read the other's KV"
            " with them; give the scales in the checkpoint, or leave that option out (scales of 1)"
        )
    name = str(vllm_config.cache_config.cache_dtype)
    return {"fp8": "fp8_e4m3"}.get(name, name)


def scales_of(vllm_config: VllmConfig, spec: AttentionSpec, layer_names: Iterable[str]) -> str:
    """The part of a block format for a quantised cache: a hash over the scales of all layers.

    So pages with other scales have another format. Empty for an unquantised cache, and in the scheduler's
    process, which has no layers.
    """
    if not quantisation_of(vllm_config, spec):
        return ""
    digest, layers = hashlib.blake2b(digest_size=8), vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        layer = layers.get(name)
        if layer is None:
            return ""
        for scale in (layer._k_scale, layer._v_scale):
            digest.update(scale.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return f" scales {digest.hexdigest()}"
