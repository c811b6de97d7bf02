"""Two models of one shape are told apart by their files, however those are cut."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvplug_vllm.weights import fingerprint_of

TENSORS = {
    "a": torch.arange(24.0).view(6, 4),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.tensor(2.0),
}


def fingerprint(folder: Path, load_format: str = "auto") -> str:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), model_weights="", revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )
    return fingerprint_of(config)


def saved(folder: Path, *parts: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    for number, part in enumerate(parts):
        save_file(part, folder / f"model-{number}.safetensors")
    return folder


def test_the_same_weights_have_one_fingerprint_however_they_are_cut(tmp_path: Path) -> None:
    whole = fingerprint(saved(tmp_path / "whole", TENSORS))
    halves = saved(tmp_path / "halves", {"c": TENSORS["c"], "b": TENSORS["b"]}, {"a": TENSORS["a"]})
    assert whole.startswith("safetensors:")
    assert fingerprint(halves) == whole


def test_other_weights_names_types_or_shapes_have_another(tmp_path: Path) -> None:
    others = {
        "value": {**TENSORS, "a": TENSORS["a"] + 1},
        "scalar": {**TENSORS, "c": torch.tensor(3.0)},
        "dtype": {**TENSORS, "b": torch.ones(3, dtype=torch.float16)},
        "shape": {**TENSORS, "a": TENSORS["a"].view(4, 6).contiguous()},
        "name": {**{name: TENSORS[name] for name in "ab"}, "d": TENSORS["c"]},
        "less": {name: TENSORS[name] for name in "ab"},
    }
    found = {fingerprint(saved(tmp_path / "whole", TENSORS))}
    found |= {fingerprint(saved(tmp_path / name, tensors)) for name, tensors in others.items()}
    assert len(found) == 1 + len(others)


def test_what_is_no_safetensors_is_not_known(tmp_path: Path) -> None:
    folder = saved(tmp_path / "whole", TENSORS)
    assert fingerprint(folder, load_format="dummy") == ""
    assert fingerprint(tmp_path / "nothing") == ""
    (tmp_path / "empty").mkdir()
    assert fingerprint(tmp_path / "empty") == ""
