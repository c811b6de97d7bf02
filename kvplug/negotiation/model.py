"""The facts of a model that must be equal at both ends, so that KV means the same at both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

import attrs

_POSITIONS: Final = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_pct",
)
"""Their names in newer and older releases of transformers."""

_LONG: Final = 8
"""The longest list that is stated whole, since a handshake's texts are short."""


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
    """Numbers in one head of one token's key; for "mla" those of the latent."""
    dtype: str
    """Of the KV cache: ``"float32"``, ``"bfloat16"``, …"""
    rope: str = ""
    """Everything about positions that changes keys: kind, base, scaling. Compared as text; see
    :func:`positions_of`."""
    window: int | None = None
    """Sliding window in tokens."""
    quantisation: str = ""
    """Quantisation of the KV cache, scales included, as text that must be equal."""
    weights: str = ""
    """Fingerprint of the weights where the engine has one; empty means unknown and is not compared."""


def positions_of(config: Any) -> str:
    """Everything about positions that changes keys, as one text: :attr:`ModelInfo.rope`.

    Args:
        config: a Hugging Face config of the language model, or an object with its attributes: the inner one
            (``get_text_config()``) of a model with several. Engines that use this function state the same
            text for the same model.
    """
    found = {name: value for name in _POSITIONS if (value := getattr(config, name, None)) is not None}
    if not found:
        return f"no rope ({config.model_type})"
    return json.dumps(_brief(found), sort_keys=True, default=str)


def _brief(value: Any) -> Any:
    """The same with a hash in place of a long list: some models have a factor for each pair of elements."""
    if isinstance(value, Mapping):
        return {name: _brief(each) for name, each in value.items()}
    if not isinstance(value, list | tuple) or len(value) <= _LONG:
        return value
    text = json.dumps(value, sort_keys=True, default=str)
    return f"{len(value)} values, blake2b {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
