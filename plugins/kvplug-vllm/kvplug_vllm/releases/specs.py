"""Whether a layer's blocks are plain keys and values. The names of the spec's fields differ by release."""

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
"""The fields of all releases, with their values in a spec of plain keys and values."""


def extras_of(spec: Any) -> str:
    """The fields, with values, by which a block holds more than one key and one value vector per token and
    head; empty for a plain block."""
    found = {name: getattr(spec, name, plain) for name, plain in _PLAIN.items()}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value != _PLAIN[name])
