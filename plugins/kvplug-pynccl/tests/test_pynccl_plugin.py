"""The plugin kvplug-pynccl: what it claims and probes, and ranks in a ring."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplug_pynccl import probe
from kvplug_testing import check_plugin


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("pynccl") == ()


def test_the_probe_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_path: str
) -> None:
    monkeypatch.setattr(probe, "_DEV", tmp_path)
    assert "no NVIDIA GPU" in probe.describe().reason
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("KVPLUG_NCCL_LIBRARY", str(tmp_path / "libnccl.so.2"))
    assert "KVPLUG_NCCL_LIBRARY" in probe.describe().reason
    monkeypatch.setenv("KVPLUG_NCCL_LIBRARY", fake_path)
    assert probe.describe().viable
