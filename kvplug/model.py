"""What must be equal at both ends for the KV of one to mean the same at the other."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ModelInfo:
    """A model, as far as its KV cache is concerned. An engine fills it from its model's config."""

    name: str = ""
    """Informative: how the operator calls the model."""
    attention: str = "mha"
    """``"mha"`` (keys and values per head; also grouped and multi-query) or ``"mla"`` (one latent)."""
    num_layers: int
    """Layers of the whole model."""
    num_kv_heads: int
    """Key/value heads of the whole model, before any tensor-parallel split."""
    head_size: int
    dtype: str
    """Of the KV cache: ``"float32"``, ``"bfloat16"``, …"""
    rope: str = ""
    """Everything about positions that changes keys: kind, base, scaling. Compared as text."""
    window: int | None = None
    """Sliding window in tokens."""
    quantisation: str = ""
    """Of the KV cache, scales included: whatever must be equal."""
    weights: str = ""
    """Fingerprint of the weights where the engine has one; empty means unknown and is not compared."""
