"""What HiCache needs a GPU for, in plain torch: copies between the engine's cache and its host memory.

SGLang calls `register` in each of its processes, by this package's entry point.
"""

from __future__ import annotations

from typing import Any

POOLS = "sglang.srt.mem_cache.pool_host"


def register() -> None:
    """Replace what copies with kernels, and the pinning of memory, which is CUDA's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for pool in ("mha.MHATokenToKVPoolHost", "mla.MLATokenToKVPoolHost"):
        HookRegistry.register(f"{POOLS}.{pool}.__init__", _unpinned, HookType.AROUND)
        HookRegistry.register(f"{POOLS}.{pool}.load_to_device_per_layer", load, HookType.REPLACE)
        HookRegistry.register(f"{POOLS}.{pool}.backup_from_device_all_layer", backup, HookType.REPLACE)


def _unpinned(original: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # it leaves 10 GiB to others, which a small machine has not
    original(*args, **{**kwargs, "pin_memory": False})


def load(
    pool: Any,
    device_pool: Any,
    host: Any,
    device: Any,
    layer: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy the rows of one layer from the host's pool into the engine's cache."""
    for mine, theirs in _buffers(pool):
        rows, index = _rows_of(pool, mine, layer, host)
        theirs[layer][device] = rows[index]


def backup(pool: Any, device_pool: Any, host: Any, device: Any, io_backend: str) -> None:
    """Copy the rows of all layers from the engine's cache into the host's pool."""
    for mine, theirs in _buffers(pool):
        for layer in range(pool.layer_num):
            rows, index = _rows_of(pool, mine, layer, host)
            rows[index] = theirs[layer][device]


def _buffers(pool: Any) -> list[tuple[Any, Any]]:
    """The host's buffers, each with the engine's caches of its layers."""
    if hasattr(pool, "device_k_buffers"):
        return [(pool.k_buffer, pool.device_k_buffers), (pool.v_buffer, pool.device_v_buffers)]
    return [(pool.kv_buffer, pool.device_kv_buffers)]


def _rows_of(pool: Any, buffer: Any, layer: int, tokens: Any) -> tuple[Any, tuple[Any, ...]]:
    """A view of one layer that has the axes of tokens first, and the index of these tokens in it."""
    paged = (tokens // pool.page_size, tokens % pool.page_size)
    match pool.layout:
        case "layer_first":
            return buffer[layer], (tokens,)
        case "page_first":
            return buffer[:, layer], (tokens,)
        case "page_first_direct":
            return buffer[:, layer], paged
        case "page_head":
            return buffer[:, :, :, layer].transpose(1, 2), paged
    raise NotImplementedError(f"the layout {pool.layout!r}")
