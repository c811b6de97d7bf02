"""The groups of layers in a KV cache, and the memory order of their tensors.

Since 0.29, vLLM's cache config declares the groups to move (``transfer_groups``) and the memory order
(``kv_cache_layout``, one of six names). Before, all groups are moved, and the order is ``"HND"`` or
``"NHD"``: vLLM's worker takes the one that its attention backend needs, else that of the variable
``VLLM_KV_CACHE_LAYOUT``, else the one that the connector requires. The scheduler's process does not know the
backend. So that both sides state the same order, the adapter then always requires one; the strides of the
tensors are checked against it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvplug import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_LETTERS = "LBHTD"
"""kvplug's letters for vLLM's logical axes L, B, H, N, C of a KV cache."""
_NAMES = {"BHTKD": "LBHNC", "BTHKD": "LBNHC", "HBTKD": "LHBNC"}
_OLD_NAMES = {"BHTKD": "HND", "BTHKD": "NHD"}
_OLD_ORDERS = {"HND": "BHTD", "NHD": "BTHD"}
_VARIABLE = "VLLM_KV_CACHE_LAYOUT"


def groups_of(cache: KVCacheConfig) -> Sequence[KVCacheGroupSpec]:
    """The groups of layers whose KV is moved."""
    groups: Sequence[KVCacheGroupSpec] = (
        cache.transfer_groups if hasattr(cache, "transfer_groups") else cache.kv_cache_groups
    )
    return groups


def order_of(cache: KVCacheConfig, required: Callable[[], str | None]) -> str:
    """Axes of one layer's tensor in memory order: ``"BHTD"`` for vLLM's LBHNC.

    ``required``: returns the axes that the connector requires, if any.

    Raises:
        ConfigError: vLLM does not declare the memory order of its cache, or has no such order.
    """
    if not declares_layout():
        return _OLD_ORDERS[os.environ.get(_VARIABLE) or layout_to_require(required()) or "HND"]
    from vllm.v1.kv_cache_layout import KVCacheLayout

    name = cache.kv_cache_layout
    if name is None:
        raise ConfigError("vLLM does not declare the memory order of its KV cache (kv_cache_layout is None)")
    order = (_LETTERS[axis] for axis in KVCacheLayout[name].stride_order)
    return "".join(letter for letter in order if letter != "L")


def layout_to_require(axes: str | None) -> str | None:
    """The adapter's result of vLLM's ``get_required_kvcache_layout``.

    ``axes``: the connector's requirement, if any.

    Raises:
        ConfigError: vLLM has no such layout.
    """
    names = _NAMES if declares_layout() else _OLD_NAMES
    if axes is None:
        return None if declares_layout() else _OLD_NAMES["BHTKD"]
    if axes not in names:
        raise ConfigError(
            f"the connector requires the KV layout {axes!r}, but vLLM has {', '.join(sorted(names))}"
        )
    return names[axes]


def as_logical(tensor: Tensor) -> Tensor:
    """vLLM's tensor of a layer as ``[B, H, N, C]``. Before 0.29, latent attention has no axis of heads."""
    return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor


def declares_layout() -> bool:
    """Whether vLLM's cache config declares the memory order."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    return "kv_cache_layout" in KVCacheConfig.__dataclass_fields__


def spec_of_all(spec: Any) -> Any:
    """The spec of one layer in a uniform-type spec, whose layers have equal specs."""
    return next(iter(spec.kv_cache_specs.values()))
