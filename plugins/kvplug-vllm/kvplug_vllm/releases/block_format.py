"""The order in which an attention kernel stores the inside of a block, which vLLM does not declare.

On CPUs the adapter determines it: the backend's own kernel writes two blocks of known keys and values, and
their bytes are hashed. Two engines whose blocks are equal use the same name for the format, whatever their
releases; a kernel that orders keys differently under the same shape gets another one. This takes a
millisecond.

The adapter does not call the kernels of other backends. Their format is named after release and backend.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import vllm

from kvplug import UnsupportedError
from kvplug_vllm.releases.base import supported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

_HEADS, _BLOCKS = 2, 2
"""The size of the test. The model's number of heads does not matter: heads lie side by side."""
_KEYS, _VALUES = 251, 241
"""Periods of the written numbers: primes that all dtypes can represent."""


def block_format_of(vllm_config: VllmConfig, layer_name: str, spec: AttentionSpec) -> str:
    """The name of the order inside a layer's blocks; "vllm" in the scheduler's process, without layers.

    Raises:
        UnsupportedError: this release of vLLM has no such kernel, or calls it differently.
    """
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    if layer is None:
        return "vllm"
    name: str = layer.get_attn_backend().get_name()
    if name != "CPU_ATTN":
        release = ".".join(vllm.__version__.split(".")[:2])
        return f"vllm {release} {name}"
    dtype, cache_dtype = vllm_config.model_config.dtype, str(vllm_config.cache_config.cache_dtype)
    return f"vllm {name} {_written_by_cpus(dtype, cache_dtype, spec)}"


def _written_by_cpus(dtype: torch.dtype, cache_dtype: str, spec: AttentionSpec) -> str:
    """The instruction set of the CPU kernel, and a hash of two blocks that it wrote."""
    tokens, size = spec.block_size, spec.head_size
    try:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa as isa_of

        isa = str(isa_of(dtype, tokens, size, cache_dtype))
        cache = torch.zeros(_BLOCKS, _HEADS, 2 * tokens, size, dtype=spec.dtype)
        keys, values = cache.chunk(2, dim=2)
        shape = (_BLOCKS * tokens, _HEADS, size)
        ops.cpu_attn_reshape_and_cache(
            _numbers(shape, _KEYS, dtype),
            _numbers(shape, _VALUES, dtype),
            keys,
            values,
            torch.arange(_BLOCKS * tokens),
            isa,
            kv_cache_dtype=cache_dtype,
        )
    except (ImportError, AttributeError, TypeError, RuntimeError) as e:
        raise UnsupportedError(
            f"cannot determine the order inside a block of vLLM {vllm.__version__}'s CPU kernels"
            f" ({type(e).__name__}: {e}). {supported()}: install one of them, or a newer kvplug-vllm"
        ) from e
    written = hashlib.blake2b(cache.view(torch.uint8).numpy().tobytes(), digest_size=8)
    return f"{isa} {written.hexdigest()}"


def _numbers(shape: tuple[int, ...], period: int, dtype: torch.dtype) -> Any:
    """Integers below ``period``, different at neighbouring places."""
    return (torch.arange(torch.Size(shape).numel()) % period).to(dtype).view(shape)
