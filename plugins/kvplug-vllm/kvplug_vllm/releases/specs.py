"""Whether a layer's blocks are plain keys and values: the fields of a spec that say so have other names."""

from __future__ import annotations

from typing import Any

_PLAIN = {
    "tokens_per_state": 1,  # since 0.29
    "compress_ratio": 1,  # before; of latent attention
    "num_head_slots": None,  # since 0.28
    "state_content_bytes": None,  # since 0.28
    "attention_chunk_size": None,
    "topk_buffer_width": None,  # since 0.33; of sparse latent attention
}
"""For each field that one release or another has, its value in a spec of plain keys and values."""


def extras_of(spec: Any) -> str:
    """The fields by which a block is more than one vector of keys and one of values per token and head, with
    their values; empty for a plain block."""
    found = {name: getattr(spec, name, plain) for name, plain in _PLAIN.items()}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value != _PLAIN[name])
