"""Small models of random weights for the tests, written as checkpoints that vLLM and SGLang load.

They answer in milliseconds, and whatever is wrong with their KV soon shows: what they say depends on every
token, and means nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, INNER = 4, 256, 8, 4, 32, 512
SPREAD = 0.2
"""Of the weights. With much less every token would be the same, whatever the KV."""
WINDOW = 80
"""Tokens that a sliding-window layer attends to: two blocks and a half."""
LATENT, ROPE, NOPE, VALUE = 512, 64, 32, 32
"""Of latent attention: vLLM's kernel for CPUs takes this size of a latent and of its rotated part only."""


def write_random_llama(folder: Path, *, like: str, seed: int = 0, **more: Any) -> None:
    """A Llama, with the tokenizer and the vocabulary of the model ``like``. Its heads divide by two.

    ``more``: further keys of its config.
    """
    attention = {
        "self_attn.q_proj.weight": (HEADS * HEAD_SIZE, WIDTH),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_SIZE),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": KV_HEADS,
        **more,
    }
    _write(folder, like, config, attention, seed)


def write_random_sliding(folder: Path, *, like: str) -> None:
    """The same with three layers of sliding-window attention to each layer of full attention, so that vLLM
    has several KV cache groups."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    write_random_llama(folder, like=like, layer_types=kinds, sliding_window=WINDOW)


def write_random_windowed(folder: Path, *, like: str) -> None:
    """The same with sliding-window attention in all layers: one KV cache group, whose blocks are freed."""
    write_random_llama(folder, like=like, layer_types=["sliding_attention"] * LAYERS, sliding_window=WINDOW)


def write_random_latent(folder: Path, *, like: str) -> None:
    """A DeepSeek V2 without experts: latent attention (MLA)."""
    attention = {
        "self_attn.q_proj.weight": (HEADS * (NOPE + ROPE), WIDTH),
        "self_attn.kv_a_proj_with_mqa.weight": (LATENT + ROPE, WIDTH),
        "self_attn.kv_a_layernorm.weight": (LATENT,),
        "self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), LATENT),
        "self_attn.o_proj.weight": (WIDTH, HEADS * VALUE),
    }
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": HEADS,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE,
        "q_lora_rank": None,
        "first_k_dense_replace": LAYERS,  # no layer has experts
        "tie_word_embeddings": False,
    }
    _write(folder, like, config, attention)


def _write(
    folder: Path,
    like: str,
    config: Mapping[str, Any],
    attention: Mapping[str, tuple[int, ...]],
    seed: int = 0,
) -> None:
    theirs = json.loads((Path(like) / "config.json").read_text())
    usual: dict[str, Any] = {
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": theirs["vocab_size"],
    }
    (folder / "config.json").write_text(json.dumps({**usual, **config}))
    for file in Path(like).glob("tokenizer*"):
        shutil.copy(file, folder)
    random = torch.Generator().manual_seed(seed)
    layer = {
        **attention,
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (theirs["vocab_size"], WIDTH),
        "model.norm.weight": (WIDTH,),
        **{f"model.layers.{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()},
    }
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (theirs["vocab_size"], WIDTH)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * SPREAD
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
