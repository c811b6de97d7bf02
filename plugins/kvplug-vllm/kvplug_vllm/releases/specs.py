"""Whether a layer's blocks are plain keys and values: the fields of a spec that say so have other names."""

from __future__ import annotations

from typing import Any

_PLAIN = {
    "tokens_per_state": 1,  # since 0.29
    "compress_ratio": 1,  # before; of latent attention
    "num_head_slots": None,  # since 0.28
    "state_content_bytes": None,  # since 0.28
    "attention_chunk_size": None,
}
"""For each field that one release or another has, its value in a spec of plain keys and values."""


def is_plain(spec: Any) -> bool:
    """Whether each block of the spec is one vector of keys and one of values per token and head."""
    return all(getattr(spec, name, plain) == plain for name, plain in _PLAIN.items())
