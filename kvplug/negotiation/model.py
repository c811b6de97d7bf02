"""The facts about a model that must be equal at both ends, so that KV means the same at both."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any, Final

import attrs

_log = logging.getLogger(__name__)

UNKNOWN_WEIGHTS: Final = "unknown: "
"""Prefix of an identity of weights that is valid for one start of one engine only."""
_POSITIONS: Final = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_pct",
)
"""The config attributes for position encodings in newer and older releases of transformers."""

_LONG: Final = 8
"""Longer lists are hashed, since a handshake's texts are short."""


@attrs.frozen(kw_only=True)
class ModelInfo:
    """The facts about a model that matter for its KV cache. An engine fills it from its model's config."""

    name: str = ""
    """Informative: the operator's name for the model."""
    attention: str = "mha"
    """``"mha"`` (keys and values per head; also grouped and multi-query) or ``"mla"`` (one latent)."""
    num_layers: int
    """Layers of the whole model."""
    num_kv_heads: int
    """Key/value heads of the whole model, before any tensor-parallel split."""
    head_size: int
    """Elements in one head of one token's key, or in the latent for "mla"."""
    dtype: str
    """Dtype of the KV cache: ``"float32"``, ``"bfloat16"``, …"""
    rope: str = ""
    """All properties of the position encoding that change keys: kind, base, scaling. Compared as text; see
    :meth:`positions_of`."""
    window: int | None = None
    """Sliding window in tokens."""
    quantisation: str = ""
    """Quantisation of the KV cache, scales included, as text that must be equal."""
    weights: str = ""
    """Identity of the weights: a fingerprint that is equal only for equal weights; empty if unknown.
    Connectors never get an empty identity: see :meth:`unknown_weights`."""

    @staticmethod
    def unknown_weights(model: str, start: str, *, warns: bool = True) -> str:
        """Return an identity for unknown weights. Other engines, and this one after a restart, get different
        ones.

        Args:
            model: the model's name.
            start: a text that differs for each start of the engine, but is the same in all of its processes.
            warns: whether to log a warning with the option to set. One process of each engine should.
        """
        if warns:
            _log.warning(
                "the weights of %s are unknown: KV that this engine saves is its own, and neither other"
                " engines nor its next start can load it. If they may, set weights to a text that names these"
                " weights, such as 'NAME at REVISION', in the configuration of each engine that has them",
                model or "the model",
            )
        return f"{UNKNOWN_WEIGHTS}{start} ({model[:100]})"

    @staticmethod
    def positions_of(config: Any) -> str:
        """Return the properties of the position encoding that change keys, as text for :attr:`rope`.

        Args:
            config: a Hugging Face config of the language model, or an object with its attributes. If the
                model's config contains several, pass the language model's (``get_text_config()``). Engines
                that use this function state the same text for the same model.
        """
        found = {name: value for name in _POSITIONS if (value := getattr(config, name, None)) is not None}
        if not found:
            return f"no rope ({config.model_type})"
        return json.dumps(_brief(found), sort_keys=True, default=str)


def _brief(value: Any) -> Any:
    """Replace long lists by a hash: some models have a factor for each pair of elements."""
    if isinstance(value, Mapping):
        return {name: _brief(each) for name, each in value.items()}
    if not isinstance(value, list | tuple) or len(value) <= _LONG:
        return value
    text = json.dumps(value, sort_keys=True, default=str)
    return f"{len(value)} values, blake2b {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
