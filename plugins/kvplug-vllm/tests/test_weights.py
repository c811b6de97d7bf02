"""Two models of one shape are told apart by their files, however those are cut."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvplug_vllm.weights import fingerprint_of, fingerprint_of_adapter

pytestmark = pytest.mark.smoke

TENSORS: dict[str, torch.Tensor] = {
    "a": torch.arange(24.0).view(6, 4),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.tensor(2.0),
}


def fingerprint(folder: Path, load_format: str = "auto", **more: Any) -> str:
    model = {"model": str(folder), "model_weights": "", "revision": None, "quantization": None}
    arch = SimpleNamespace(quantization_config=more.pop("in_checkpoint", None))
    load = SimpleNamespace(load_format=load_format, download_dir=more.pop("download_dir", None))
    draft = more.pop("draft", None)
    found = SimpleNamespace(**model | more, model_arch_config=arch)
    draft_config = draft and SimpleNamespace(**{**vars(found), "model": str(draft)})
    config: Any = SimpleNamespace(
        model_config=found,
        load_config=load,
        speculative_config=draft and SimpleNamespace(draft_model_config=draft_config),
    )
    return fingerprint_of(config)


def saved(folder: Path, *parts: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    for number, part in enumerate(parts):
        save_file(part, folder / f"model-{number}.safetensors")
    return folder


def test_a_draft_models_weights_count_too(tmp_path):
    folder, one = saved(tmp_path / "whole", TENSORS), saved(tmp_path / "one", {"a": torch.ones(2)})
    other = saved(tmp_path / "other", {"a": torch.zeros(2)})
    found = {fingerprint(folder), *(fingerprint(folder, draft=each) for each in (one, other))}
    assert len(found) == 3 and all(found)
    assert fingerprint(folder, draft=tmp_path / "nothing") == "", "one of the two is not known"


def test_an_adapter_that_cannot_be_read_is_of_this_engine_only(caplog):
    found = fingerprint_of_adapter("/no/such/adapter")
    assert fingerprint_of_adapter("/no/such/adapter") == found != "/no/such/adapter"
    assert [record.getMessage()[:61] for record in caplog.records] == [
        "the weights of the LoRA adapter /no/such/adapter are unknown "
    ]


def test_files_that_are_no_safetensors_or_cannot_be_read_are_not_known(tmp_path):
    folder = saved(tmp_path / "whole", TENSORS)
    for load_format in ("dummy", "pt", "npcache", "tensorizer", "a later one"):
        assert fingerprint(folder, load_format=load_format) == ""
    assert fingerprint(tmp_path / "nothing") == ""
    (tmp_path / "empty").mkdir()
    assert fingerprint(tmp_path / "empty") == ""
    for content in (b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"):
        (folder / "model-1.safetensors").write_bytes(content)
        assert fingerprint(folder) == ""


def test_what_lies_beside_a_model_makes_no_difference(tmp_path):
    """An index says which files are the model's; those of an adapter, or of an older revision, are not."""
    plain = saved(tmp_path / "plain", TENSORS)
    beside = saved(tmp_path / "beside", TENSORS, {"old": torch.ones(2)})
    save_file({"lora_A": torch.ones(2, 2)}, beside / "adapter_model.safetensors")
    assert fingerprint(beside) != fingerprint(plain), "without an index, vLLM reads them all"
    index = {"weight_map": {**dict.fromkeys(TENSORS, "model-0.safetensors"), "gone": "model-9.safetensors"}}
    (beside / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert fingerprint(beside) == fingerprint(plain)


def test_of_two_copies_the_one_that_is_loaded_counts(tmp_path):
    """Mistral's models come twice, under two sets of names; vLLM prefers Mistral's own."""
    theirs = {f"layers.{name}": tensor for name, tensor in TENSORS.items()}
    both, only = saved(tmp_path / "both", TENSORS), saved(tmp_path / "only", theirs)
    (only / "model-0.safetensors").rename(only / "consolidated.safetensors")
    save_file(theirs, both / "consolidated.safetensors")
    for load_format in ("auto", "mistral"):
        assert fingerprint(both, load_format) == fingerprint(only, load_format) != ""
    assert fingerprint(both, "hf") == fingerprint(both, "safetensors") != fingerprint(only)
    assert fingerprint(saved(tmp_path / "none", TENSORS), "mistral") == ""


def test_weights_that_are_quantised_when_loaded_are_others(tmp_path):
    folder = saved(tmp_path / "whole", TENSORS)
    plain, online = fingerprint(folder), fingerprint(folder, quantization="fp8")
    assert len({plain, online, fingerprint(folder, quantization="int8")}) == 3
    own = {"quant_method": "awq"}
    for method in ("awq", "awq_marlin"):  # which one, the device decides
        assert fingerprint(folder, quantization=method, in_checkpoint=own) == plain


def test_a_checkpoint_in_the_cache_of_the_hub_is_found(tmp_path):
    """As huggingface_hub lays it out: links into its blobs, and which revision "main" is."""
    repo = tmp_path / "models--some--model"
    repo.mkdir()
    blobs = saved(repo / "blobs", TENSORS)
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blobs / "model-0.safetensors")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc", encoding="utf-8")
    here = fingerprint(saved(tmp_path / "whole", TENSORS))
    assert fingerprint(Path("some/model"), download_dir=str(tmp_path)) == here
    assert fingerprint(Path("some/other"), download_dir=str(tmp_path)) == ""
