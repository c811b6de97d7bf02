"""The options of the engine."""

from __future__ import annotations

import attrs

from kvplug.engine import CacheGroup, KVCacheConfig, KVLayout
from kvplug_transformers.model.facts import ModelFacts

LAYOUTS = ("KBTHD", "KBHTD")
"""Layouts of one layer's pages: heads inside tokens, or tokens inside heads."""

POLICIES = ("recompute", "fail")


@attrs.frozen(kw_only=True)
class EngineOptions:
    """The size of the cache, its memory layout, and the limits of one step."""

    block_size: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    """Tokens in a block."""
    num_blocks: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    layout: str = attrs.field(default="KBTHD", validator=attrs.validators.in_(LAYOUTS))
    max_tokens_per_step: int = attrs.field(default=512, validator=attrs.validators.ge(1))
    """Longer prompts are computed in chunks of this size."""
    max_requests: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    """How many requests have blocks at the same time; the others wait."""
    load_failure_policy: str = attrs.field(default="recompute", validator=attrs.validators.in_(POLICIES))
    """What to do with a request whose KV could not be loaded."""


def cache_config(facts: ModelFacts, options: EngineOptions, tensor_size: int = 1) -> KVCacheConfig:
    """The paged cache of an engine with these options: the ``cache`` of ``build_connector``.

    If ``tensor_size`` workers share the model, this is the cache of each: it has its part of the heads.
    """
    sizes = {
        "K": 2,
        "B": options.num_blocks,
        "T": options.block_size,
        "H": facts.info.num_kv_heads // tensor_size,
        "D": facts.info.head_size,
    }
    group = CacheGroup(layer_names=facts.layer_names, layout=KVLayout(options.layout, sizes))
    return KVCacheConfig(groups=(group,), num_blocks=options.num_blocks)
