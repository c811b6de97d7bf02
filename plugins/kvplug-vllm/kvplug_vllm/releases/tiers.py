"""Differences in the interface of secondary tiers.

Since 0.31 vLLM passes a tier its back-pressure detector, and a tier reports how many bytes it moved. Since
0.32 vLLM counts hits by their source. Since 0.33 it calls a tier from several threads, one at a time, under
its own lock.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import vllm

from kvplug import UnsupportedError

_BACKPRESSURE: Final = "vllm.v1.kv_offload.tiering.backpressure"
_SOURCES: Final = {"CPU": "HOST", "STORAGE": "DISK"}
"""The name of the source of hits in each medium."""


def check_tiers() -> None:
    """Raises UnsupportedError: vLLM's tiers have another interface."""
    try:
        found = importlib.util.find_spec(_BACKPRESSURE)
    except ModuleNotFoundError:  # a parent package is missing
        found = None
    if found is None:
        raise UnsupportedError(
            "KvplugTier is written for the secondary tiers of vLLM 0.31 to 0.33; this is"
            f" {vllm.__version__}, which has no {_BACKPRESSURE}"
        )


def hit_source_of(medium: Any) -> Any | None:
    """vLLM's source of hits in this medium; ``None`` if it does not count by source."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource[_SOURCES[medium.value]]
