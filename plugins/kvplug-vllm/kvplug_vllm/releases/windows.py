"""Whether vLLM's CPU kernel is correct for layers with a window that share a group with others.

vLLM puts all layers into one group for a connector that supports only one, and with
``--disable-hybrid-kv-cache-manager``. The kernel splits the KV of a long request among threads by the group's
window. A layer's window differs, so a thread may have no token inside it, and then adds memory that was never
written. Tested in 0.27.1 to 0.32.0 without kvplug: wrong tokens, or NaN. Without splitting, all is correct.
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
            " vLLM's CPU kernel computes such a group wrong if it splits a request among threads. Set"
            " VLLM_CPU_ATTN_SPLIT_KV=0, or start this model without a connector"
        )


def _splits_kv() -> bool:
    from vllm import envs
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu() and getattr(envs, "VLLM_CPU_ATTN_SPLIT_KV", False))
