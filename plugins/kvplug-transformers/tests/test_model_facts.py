"""Which models are served, which are refused, and what makes two models different."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvplug import UnsupportedError
from kvplug_transformers.engine.engine import Engine
from kvplug_transformers.model.facts import describe
from kvplug_transformers.model.load import load

pytestmark = pytest.mark.timeout(60)

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def mistral(**more):
    return MistralForCausalLM(MistralConfig(**{**SMALL, "head_dim": 16, **more}))


def latent():
    names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    heads = dict.fromkeys(names, 8)
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**SMALL, "num_key_value_heads": 2}, **heads, first_k_dense_replace=2)
    )


REFUSED = {
    "sliding window": (lambda: mistral(sliding_window=8), "keeps a sliding window only (8 tokens)"),
    "some layers sliding": (
        lambda: Gemma2ForCausalLM(Gemma2Config(**{**SMALL, "head_dim": 16, "sliding_window": 8})),
        "keeps a sliding window only (8 tokens)",
    ),
    "recurrent": (
        lambda: MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64)),
        "keeps a recurrent state",
    ),
    "latent attention": (latent, "has latent attention (MLA)"),
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
        ),
        "is an encoder-decoder model",
    ),
    "attention of its own": (
        lambda: BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=64)),
        "its attention cannot be replaced",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_with_another_kind_of_cache_is_refused_by_name(kind):
    make, reason = REFUSED[kind]
    model = make()
    with pytest.raises(UnsupportedError) as caught:
        Engine(model)
    assert type(model).__name__ in str(caught.value)
    assert reason in str(caught.value)


def test_a_mistral_without_a_window_is_served(alone, random_prompt):
    torch.manual_seed(0)
    model = mistral(sliding_window=None, initializer_range=0.2).eval()
    prompt = [token % 64 for token in random_prompt(20)]
    engine = Engine(model)
    sequence = engine.add(prompt, max_new_tokens=5)
    list(engine.run())
    assert sequence.output == alone(model, prompt, 5)


def test_the_facts_are_those_of_the_cache(llama, gpt2):
    info = describe(llama).info
    assert (info.num_layers, info.num_kv_heads, info.head_size, info.dtype) == (3, 2, 16, "float32")
    assert "rope_theta" in info.rope
    assert describe(llama).context == 512
    other = describe(gpt2).info
    assert (other.num_kv_heads, other.rope) == (4, "no rope (gpt2)")


def test_the_fingerprint_tells_weights_apart_and_dtypes_not(llama):
    before = describe(llama).info.weights
    assert describe(copy.deepcopy(llama)).info.weights == before
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert describe(other).info.weights != before
    quantised = [copy.deepcopy(llama), copy.deepcopy(llama)]
    for number, model in enumerate(quantised):
        model.model.layers[1].mlp.register_buffer("qweight", torch.full((4,), number, dtype=torch.int32))
    assert len({before, *(describe(model).info.weights for model in quantised)}) == 3
    half = copy.deepcopy(llama).to(torch.bfloat16)
    assert describe(half).info.weights == describe(half.to(torch.float32)).info.weights


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(UnsupportedError, match="holds no model that transformers knows") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_with_an_encoder_decoder_model_is_refused_by_name(tmp_path):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"encoder-decoder model \(t5\)"):
        load(tmp_path)


def test_a_model_that_needs_code_of_its_own_is_refused_and_nobody_is_asked(llama, tmp_path, monkeypatch):
    llama.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "of-its-own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("input was called"))
    with pytest.raises(UnsupportedError, match="needs code of its own, which is never run"):
        load(tmp_path)


def test_weights_cut_short_are_refused_in_one_line_with_the_folder(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(
        UnsupportedError, match=rf"the model in {tmp_path} \(llama\) cannot be loaded"
    ) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
