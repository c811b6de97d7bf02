"""Whether vLLM's kernel for CPUs computes layers with a window right that share a group with others.

vLLM makes one group of them for a connector that knows one group only, and with
``--disable-hybrid-kv-cache-manager``. The kernel of 0.27 then applies the window to all layers of the group,
with or without a connector. Since 0.28 its builder looks at each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm

from kvplug import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec


def computes_mixed_groups() -> bool:
    """Whether layers of one group may have different windows. Always so where the platform is no CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return True
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    return hasattr(CPUAttentionMetadataBuilder, "_group_sliding_window")


def check_window(spec: AttentionSpec) -> None:
    """Check the spec of a group whose blocks are kept.

    Raises:
        UnsupportedError: some of its layers have a window, and vLLM would compute the others with it, too.
    """
    window: int | None = getattr(spec, "sliding_window", None)
    if window is not None and not computes_mixed_groups():
        raise UnsupportedError(
            f"vLLM {vllm.__version__} makes one KV cache group of layers with a window of {window} tokens and"
            " layers without one, as it does for any connector, and on CPUs it computes such a group wrong."
            " Use vLLM 0.28 or later, or start this model without a connector"
        )
