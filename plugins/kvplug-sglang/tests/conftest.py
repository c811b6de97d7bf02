"""Fixtures for kvplug inside SGLang. Without SGLang these tests are not collected; `tox run -e sglang`
installs it, with what it needs to run on a CPU."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, INNER = 4, 256, 8, 4, 32, 512


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of two small models of one shape and different random weights.

    They answer in milliseconds, and whatever is wrong with their KV shows: what they say depends on every
    token, and means nothing.
    """
    from kvplug_transformers.model.bundled import find_gguf
    from kvplug_transformers.model.convert import converted

    like = Path(converted(find_gguf()))
    made = [tmp_path_factory.mktemp(f"llama{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(made):
        _write_llama(folder, like, seed)
    return str(made[0]), str(made[1])


def _write_llama(folder: Path, like: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    vocabulary = json.loads((like / "config.json").read_text())["vocab_size"]
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
        "vocab_size": vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in like.glob("tokenizer*"):
        shutil.copy(file, folder)
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
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.2
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
