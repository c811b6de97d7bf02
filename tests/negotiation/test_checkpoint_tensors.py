"""Two models of one shape are told apart by their files, however those are cut."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvplug.engine import Checkpoint

TENSORS: dict[str, torch.Tensor] = {
    "a": torch.arange(24.0).view(6, 4),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.tensor(2.0),
}


def fingerprint(folder: Path) -> str:
    return Checkpoint.fingerprint(Checkpoint.files(folder))


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


def experts(change: int | None = None, by: float = 1.0) -> dict[str, torch.Tensor]:
    made = {f"layers.{at % 4}.experts.{at // 4}.w": torch.full((4, 4), float(at)) for at in range(2000)}
    names = list(made)
    for name in names if change is None else [names[change]]:
        made[name] = made[name] + by
    return {**made, "embed": torch.ones(4, 4)}


def test_of_very_many_of_one_kind_some_are_looked_at(tmp_path: Path) -> None:
    plain = fingerprint(saved(tmp_path / "plain", experts(by=0)))
    assert fingerprint(saved(tmp_path / "tuned", experts())) != plain
    changes = {at: fingerprint(saved(tmp_path / f"{at}", experts(change=at))) for at in range(0, 2000, 500)}
    assert 0 < sum(found != plain for found in changes.values()) < len(changes)
    other = {**experts(by=0), "layers.3.experts.499.w": torch.full((4, 5), 1999.0)}
    assert fingerprint(saved(tmp_path / "shape", other)) != plain, "the shape of each"


def test_every_kind_of_tensor_has_a_value(tmp_path: Path) -> None:
    odd = {
        "none": torch.empty(0, 4),
        "empty": torch.empty(3, 0),
        "bools": torch.tensor([True, False]),
        "eight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "fused": torch.arange(60.0).view(5, 3, 4),
        "long": torch.arange(200_000),
    }
    plain = fingerprint(saved(tmp_path / "plain", odd))
    changes = {
        "bools": torch.tensor([True, True]),
        "eight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "fused": torch.arange(60.0).view(5, 3, 4) * 2,
        "long": torch.arange(200_000) + 1,
    }
    found = {fingerprint(saved(tmp_path / name, {**odd, name: changes[name]})) for name in changes}
    assert len(found | {plain}) == 1 + len(changes)


def test_the_bytes_that_are_hashed_are_the_first_and_the_middle_ones(tmp_path: Path) -> None:
    """Of the bytes in the file, which lie where its header says: another reader gets the same hash."""
    tensor = torch.arange(60_000, dtype=torch.int16).view(5, 12_000)
    raw = tensor.numpy().tobytes()
    sample = hashlib.blake2b(raw[:8192] + raw[60_000 : 60_000 + 8192], digest_size=16).digest()
    whole = hashlib.blake2b(b"x I16 [5, 12000] " + sample, digest_size=16)
    assert fingerprint(saved(tmp_path / "model", {"x": tensor})) == f"safetensors:{whole.hexdigest()}"


def test_an_adapter_differs_by_its_weights_and_by_its_scale(tmp_path: Path) -> None:
    def adapter(name: str, weight: float, alpha: int) -> str:
        folder = tmp_path / name
        folder.mkdir()
        save_file({"lora_A": torch.full((2, 2), weight)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": alpha}))
        return Checkpoint.adapter_fingerprint(folder)

    assert adapter("one", 1, 16) == adapter("same", 1, 16)
    assert len({adapter("first", 1, 16), adapter("trained", 2, 16), adapter("scaled", 1, 32)}) == 3


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]", b'\x08\0\0\0\0\0\0\0{"a": 3}'],
    ids=["empty", "noise", "a list", "no tensor"],
)
def test_a_file_that_is_no_safetensors_file_is_an_error(content: bytes, tmp_path: Path) -> None:
    folder = saved(tmp_path / "whole", TENSORS)
    (folder / "model-1.safetensors").write_bytes(content)
    with pytest.raises(ValueError):
        fingerprint(folder)
