"""A small model for the tests, written as a checkpoint that vLLM loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, INNER = 4, 256, 8, 4, 32, 512
SPREAD = 0.2
"""Of the weights. With much less every token would be the same, whatever the KV."""


def write_random_llama(folder: Path, *, like: str) -> None:
    """A Llama of random weights, with the tokenizer and the vocabulary of the model ``like``.

    It answers in milliseconds, its heads divide by two, and whatever is wrong with its KV soon shows: what it
    says depends on every token, and means nothing.
    """
    theirs = json.loads((Path(like) / "config.json").read_text())
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": theirs["vocab_size"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in Path(like).glob("tokenizer*"):
        shutil.copy(file, folder)
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * SPREAD
        for name, shape in _shapes(config["vocab_size"]).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        shapes |= {
            f"{here}.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, WIDTH),
            f"{here}.self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
            f"{here}.self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
            f"{here}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_SIZE),
            f"{here}.mlp.gate_proj.weight": (INNER, WIDTH),
            f"{here}.mlp.up_proj.weight": (INNER, WIDTH),
            f"{here}.mlp.down_proj.weight": (WIDTH, INNER),
            f"{here}.input_layernorm.weight": (WIDTH,),
            f"{here}.post_attention_layernorm.weight": (WIDTH,),
        }
    return shapes
