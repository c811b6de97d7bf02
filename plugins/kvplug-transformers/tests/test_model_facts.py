"""Which models are served, which are refused, and what makes two models different."""

from __future__ import annotations

import copy
import json
import os

import pytest

from kvplug import UnsupportedError

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
LATENT = dict.fromkeys(
    ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8
) | {"num_key_value_heads": 2, "first_k_dense_replace": 2}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}


@pytest.fixture
def facts(models):
    """The module with the facts of models."""
    from kvplug_transformers.model import facts

    return facts


@pytest.mark.parametrize(
    ("family", "head", "options", "reason"),
    [
        (
            "Gemma2",
            "CausalLM",
            {"head_dim": 16, "sliding_window": 8},
            "keeps a sliding window only (8 tokens)",
        ),
        ("Mamba", "CausalLM", {}, "keeps a recurrent state"),
        ("DeepseekV3", "CausalLM", LATENT, "has latent attention (MLA)"),
        ("T5", "ConditionalGeneration", T5, "is an encoder-decoder model"),
        ("Bloom", "CausalLM", {"n_layer": 2, "n_head": 2}, "its attention cannot be replaced"),
    ],
)
def test_a_model_with_another_kind_of_cache_is_refused_by_name(models, facts, family, head, options, reason):
    config = getattr(models, f"{family}Config")(**{**SMALL, **options})
    model = getattr(models, f"{family}For{head}")(config)
    with pytest.raises(UnsupportedError) as caught:
        facts.describe(model)
    assert type(model).__name__ in str(caught.value)
    assert reason in str(caught.value)


def test_the_facts_are_those_of_the_cache(llama, gpt2, facts):
    info = facts.describe(llama).info
    assert (info.num_layers, info.num_kv_heads, info.head_size, info.dtype) == (3, 2, 16, "float32")
    assert "rope_theta" in info.rope
    assert facts.describe(llama).context == 512
    other = facts.describe(gpt2).info
    assert (other.num_kv_heads, other.rope) == (4, "no rope (gpt2)")


def test_the_fingerprint_differs_for_other_weights_and_not_for_other_dtypes(llama, facts):
    import torch

    before = facts.fingerprint(llama)
    assert facts.fingerprint(copy.deepcopy(llama)) == before
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    quantised = [copy.deepcopy(llama), copy.deepcopy(llama)]
    for number, model in enumerate(quantised):
        model.model.layers[1].mlp.register_buffer("qweight", torch.full((4,), number, dtype=torch.int32))
    assert len({before, *map(facts.fingerprint, (other, *quantised))}) == 4
    half = copy.deepcopy(llama).to(torch.bfloat16)
    assert facts.fingerprint(half) == facts.fingerprint(half.to(torch.float32))


# -- folders -----------------------------------------------------------------------------------------


def needs_own_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "of-its-own", "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('it was run')")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no model that transformers knows"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "t5"}'), r"decoder model \(t5\)"),
        (needs_own_code, "needs its own code, which is never run"),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), r"\(llama\) cannot be loaded"),
    ],
    ids=["no model", "an encoder and a decoder", "code of its own", "weights cut short"],
)
def test_a_folder_that_cannot_be_served_is_refused_in_one_line_that_names_it(
    llama, tmp_path, monkeypatch, change, why
):
    from kvplug_transformers.model.load import load

    llama.save_pretrained(tmp_path)
    change(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("input was called"))
    with pytest.raises(UnsupportedError, match=why) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
