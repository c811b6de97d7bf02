"""The plugin "cuda-ipc": what it claims, and where it cannot work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvplug import UnsupportedError
from kvplug_cuda_ipc import probe
from kvplug_cuda_ipc.cudart.errors import CudaLibraryError
from kvplug_cuda_ipc.device import CudaDevice
from kvplug_lab.gpu.cuda_ipc import HostDevice
from kvplug_testing import check_plugin


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("cuda-ipc") == ()


def test_the_probe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(probe, "_DEV", tmp_path)
    assert "no NVIDIA GPU" in probe.describe().reason
    (tmp_path / "dxg").touch()
    assert "WSL" in probe.describe().reason
    (tmp_path / "nvidia0").touch()
    assert probe.describe().viable
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert "CUDA_VISIBLE_DEVICES" in probe.describe().reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    assert probe.describe().viable
    for name in ("net", "ipc", "pid"):  # memory is shared in
        assert os.readlink(f"/proc/self/ns/{name}") in probe.domain()
    monkeypatch.setattr(probe, "_NAMESPACES", tmp_path)
    assert "namespaces" in probe.describe().reason
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "it needs Linux" in probe.describe().reason


def test_a_cpu_tensor_on_a_pipe_of_gpus_and_a_library_that_is_not_there_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, fake_path: str, local_pair: Any
) -> None:
    gpu = HostDevice(fake_path)
    one, _ = local_pair(device=gpu)
    gpu.name = "cuda:0"
    with pytest.raises(UnsupportedError, match="sends tensors on cuda:0, and this one is on cpu: move it"):
        one.send_tensor(torch.rand(50))
    with pytest.raises(UnsupportedError, match="receives into tensors on cuda:0, and this one is on cpu"):
        one.recv_tensor(torch.rand(50))
    for name, value in {"is_available": True, "current_device": 0, "device_count": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with pytest.raises(CudaLibraryError, match="/nowhere/libcudart"):
        CudaDevice("cuda:0", "/nowhere/libcudart.so.12")
