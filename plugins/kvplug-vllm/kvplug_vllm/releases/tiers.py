"""The interface of secondary tiers, as far as it differs.

Since 0.31 vLLM hands a tier its detector of back-pressure, and a tier tells how many bytes it has moved.
Since 0.32 vLLM counts hits by where they come from. Since 0.33 it calls a tier from several threads, one at a
time, under a lock of its own.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import vllm

from kvplug import UnsupportedError

_BACKPRESSURE: Final = "vllm.v1.kv_offload.tiering.backpressure"
_SOURCES: Final = {"CPU": "HOST", "STORAGE": "DISK"}
"""Names of media, and of the sources of hits in them."""


def check_tiers() -> None:
    """
    Raises:
        UnsupportedError: tiers have another interface here.
    """
    try:
        found = importlib.util.find_spec(_BACKPRESSURE)
    except ModuleNotFoundError:  # of a parent
        found = None
    if found is None:
        raise UnsupportedError(
            "KvplugTier is written for the secondary tiers of vLLM 0.31 to 0.33; this is"
            f" {vllm.__version__}, which has no {_BACKPRESSURE}"
        )


def hit_source_of(medium: Any) -> Any | None:
    """What vLLM counts a hit in this medium as; ``None``: it does not."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource[_SOURCES[medium.value]]
