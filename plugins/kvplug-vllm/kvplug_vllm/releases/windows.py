"""Whether vLLM's kernel for CPUs computes layers with a window right that share a group with others.

vLLM makes one group of all layers for a connector that knows one group only, and with
``--disable-hybrid-kv-cache-manager``. The kernel splits the KV of a long request among threads by the window
of the group. The layers have others, so a thread may have no token of a layer's window: what it adds then was
never written. That was tried in 0.27.1 to 0.32.0, without kvplug: other tokens, or NaN. Without splitting all
is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplug import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec


def check_window(spec: AttentionSpec) -> None:
    """Check the spec of a group whose blocks are kept.

    Raises:
        UnsupportedError: some of its layers have a window, and vLLM may compute them wrong on this platform.
    """
    window: int | None = getattr(spec, "sliding_window", None)
    if window is not None and _splits_kv():
        raise UnsupportedError(
            f"one KV cache group has layers with a window of {window} tokens and layers without one, and"
            " vLLM's kernel for CPUs computes such a group wrong where it splits a request among threads. Set"
            " VLLM_CPU_ATTN_SPLIT_KV=0, or start this model without a connector"
        )


def _splits_kv() -> bool:
    from vllm import envs
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu() and getattr(envs, "VLLM_CPU_ATTN_SPLIT_KV", False))
