"""The plugin "cuda-ipc": its description, where it cannot work, and what its pipe refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cuda_ipc_ends as ends
from kvplug import ConfigError, ResourceExhaustedError, TransportError, UnsupportedError
from kvplug.transport import Credentials, PipeContext, WireError
from kvplug_cuda_ipc import plugin, probe
from kvplug_cuda_ipc.cudart.errors import CudaLibraryError
from kvplug_cuda_ipc.device import CudaDevice
from kvplug_cuda_ipc.options import CudaIpcPipeOptions
from kvplug_cuda_ipc.pipe.contact import CudaIpcContact
from kvplug_cuda_ipc.pipe.content import Target, content_of
from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint
from kvplug_lab.gpu.cuda_ipc import HostDevice
from kvplug_testing import check_plugin

ENDS = Path(__file__).with_name("cuda_ipc_ends.py")
local_pair = ends.local_pair


# -- the plugin ----------------------------------------------------------------------------------------


def test_the_plugin_offers_the_pipe_by_strings_alone() -> None:
    (spec,) = plugin.kvplug_transports()
    assert (spec.kind, spec.name) == ("pipe", "cuda-ipc")
    assert spec.capabilities.devices == {"cuda"}
    assert spec.capabilities.authenticated and not spec.capabilities.cross_host
    assert spec.load_options() is CudaIpcPipeOptions
    assert spec.load_factory() is CudaIpcEndpoint


def test_describing_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvplug_cuda_ipc import plugin; specs = plugin.kvplug_transports();"
        "[(spec.run_probe(), spec.load_options()) for spec in specs];"
        "print([n for n in ('torch', 'numpy', 'kvplug_cuda_ipc.pipe.endpoint') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


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
    monkeypatch.setattr(probe, "_NAMESPACES", tmp_path)
    assert "namespaces" in probe.describe().reason
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "it needs Linux" in probe.describe().reason


def test_the_domain_has_every_namespace_that_memory_is_shared_in() -> None:
    for name in ("net", "ipc", "pid"):
        assert os.readlink(f"/proc/self/ns/{name}") in probe.domain()


def test_it_keeps_the_laws_of_plugins() -> None:
    from importlib.metadata import entry_points

    if not entry_points(group="kvplug", name="cuda-ipc"):
        pytest.skip("kvplug-cuda-ipc is not installed here")
    assert check_plugin("cuda-ipc") == ()


# -- what is refused -----------------------------------------------------------------------------------


def _context(device: str = "cuda", **options: Any) -> PipeContext:
    return PipeContext(options=CudaIpcPipeOptions(**options), credentials=Credentials(), device=device)


def test_a_device_that_is_no_gpu_is_refused() -> None:
    for device, said in (("cpu", "moves CUDA tensors"), ("nowhere", "no device of torch's")):
        with pytest.raises(ConfigError, match=said):
            CudaIpcEndpoint(_context(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_there_is_no_gpu_the_endpoint_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        CudaIpcEndpoint(_context())


def test_a_gpu_must_be_there_and_the_current_one_is_the_default(
    monkeypatch: pytest.MonkeyPatch, fake_path: str
) -> None:
    for name, value in {"is_available": True, "current_device": 1, "device_count": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert CudaDevice("cuda", fake_path).name == "cuda:1"
    assert CudaDevice("cuda:0", fake_path).name == "cuda:0"
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        CudaDevice("cuda:2", fake_path)
    with pytest.raises(CudaLibraryError, match="/nowhere/libcudart"):
        CudaDevice("cuda:0", "/nowhere/libcudart.so.12")


def test_a_tensor_of_another_device_is_refused_by_name_and_nothing_is_queued(local_pair: Any) -> None:
    one, other = local_pair()
    with pytest.raises(UnsupportedError, match="sends tensors on cpu, and this one is on meta"):
        one.send_tensor(torch.empty(3, device="meta"))
    with pytest.raises(UnsupportedError, match="sends blocks of tensors on cpu, and this one is on meta"):
        one.send_blocks([torch.empty(3, 4, device="meta")], [1])
    one.send_tensor(torch.arange(3))
    with pytest.raises(UnsupportedError, match="receives into tensors on cpu, and this one is on meta"):
        other.recv_tensor(torch.empty(3, dtype=torch.int64, device="meta"))
    assert other.recv_tensor().tolist() == [0, 1, 2]


def test_a_cpu_tensor_on_a_pipe_of_gpus_is_refused_by_name() -> None:
    gpu = HostDevice.__new__(HostDevice)
    gpu.name = "cuda:0"
    with pytest.raises(UnsupportedError, match="sends tensors on cuda:0, and this is a CPU one; move it"):
        content_of(torch.rand(50), gpu)
    with pytest.raises(UnsupportedError, match="receives into tensors on cuda:0, and this is a CPU one"):
        Target(gpu, out=torch.rand(50))


def test_no_memory_for_a_copy_is_an_error_that_says_so(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr("kvplug_cuda_ipc.pipe.content.dense", full)
    one, other = local_pair()
    with pytest.raises(ResourceExhaustedError, match="copying what is to be sent; nothing was queued"):
        one.send_tensor(torch.arange(6).view(2, 3).t())
    one.send_tensor(None)
    assert other.recv_tensor() is None


def test_contacts_of_other_transports_and_of_other_hosts_are_refused(fake_path: str) -> None:
    end = ends.endpoint(fake_path)
    for text in ("", "shm1 a unix:@x", "cudaipc1 a tcp:1", "cudaipc1  unix:@x"):
        with pytest.raises(WireError, match="not a contact of the pipe 'cuda-ipc'"):
            end.connect(text)
    with pytest.raises(TransportError, match="other namespaces"):
        end.connect(str(CudaIpcContact("elsewhere", ("unix:@x",))))
