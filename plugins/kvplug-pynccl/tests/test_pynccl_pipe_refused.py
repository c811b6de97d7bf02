"""Devices, libraries, tensors and addresses that the pipe "pynccl" refuses by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import pynccl_ends as ends
from kvplug import ConfigError, ResourceExhaustedError, TransportError, UnsupportedError
from kvplug.transport import Blocks, Credentials, PipeContext
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl import interface
from kvplug_pynccl.device import CudaDevice
from kvplug_pynccl.nccl.errors import NcclLibraryError
from kvplug_pynccl.nccl.places import places
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_pynccl.pipe.content import check_out, content_of
from kvplug_pynccl.pipe.endpoint import PyncclEndpoint
from kvplug_pynccl.pipe.frames import Announcement, Frame, FrameType

ENDS = Path(__file__).with_name("pynccl_ends.py")
local_pair = ends.local_pair

PATIENCE_S = ends.PATIENCE_S

# -- what is refused -----------------------------------------------------------------------------------


def _context(device: str = "cuda", host: str = "127.0.0.1", **options: Any) -> PipeContext:
    return PipeContext(
        options=PyncclPipeOptions(**options), credentials=Credentials(), device=device, host=host
    )


def test_a_device_that_is_no_gpu_is_refused() -> None:
    for device, said in (("cpu", "moves CUDA tensors"), ("nowhere", "torch does not know")):
        with pytest.raises(ConfigError, match=said):
            PyncclEndpoint(_context(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_there_is_no_gpu_the_endpoint_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        PyncclEndpoint(_context())


def test_gpus_are_counted_and_the_current_one_is_meant_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"is_available": True, "current_device": 1, "device_count": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert CudaDevice("cuda").name == "cuda:1"
    assert CudaDevice("cuda:0").name == "cuda:0"
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        CudaDevice("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_itself_without_a_gpu_is_an_error_of_its_own_and_the_process_goes_on(
    fake_path: str, local_pair: Any
) -> None:
    place = next(places())
    if place.missing:
        pytest.skip(f"{place.what}: {place.missing}")
    end = ends.endpoint(place.path, device=HostDevice(fake_path))
    with end.listen() as listener:
        for _ in range(2):
            with pytest.raises(TransportError, match="there is no GPU"):
                end.connect(listener.contact)
    one, other = local_pair()
    one.send_tensor(None)
    assert other.recv_tensor() is None


def test_a_library_that_is_not_there_is_named(fake_path: str) -> None:
    with pytest.raises(NcclLibraryError, match="/nowhere/libnccl"):
        PyncclEndpoint(_context("cpu", library="/nowhere/libnccl.so.2"), HostDevice(fake_path))


def test_a_tensor_of_another_device_is_refused_by_name_and_nothing_is_queued(local_pair: Any) -> None:
    one, other = local_pair()
    with pytest.raises(UnsupportedError, match="meta"):
        one.send_tensor(torch.empty(3, device="meta"))
    one.send_tensor(torch.arange(3))
    with pytest.raises(UnsupportedError, match="meta"):
        other.recv_tensor(torch.empty(3, dtype=torch.int64, device="meta"))
    assert other.recv_tensor().tolist() == [0, 1, 2]


def test_where_there_is_no_memory_for_a_copy_nothing_is_queued(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()

    def full(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        with pytest.raises(ResourceExhaustedError, match=r"400 bytes.*nothing was queued.*out of memory"):
            one.send_tensor(torch.zeros(100))
        patch.setattr(Blocks, "gathered", full)
        with pytest.raises(ResourceExhaustedError, match="80 bytes"):
            one.send_blocks([torch.zeros(5, 10)], [1, 3])
    one.send_tensor(torch.arange(3))
    assert other.recv_tensor(timeout=PATIENCE_S).tolist() == [0, 1, 2]


def test_a_cpu_tensor_on_a_pipe_of_gpus_is_refused_by_name_or_staged() -> None:
    class Gpu(HostDevice):
        def owns(self, tensor: Any) -> bool:
            return getattr(tensor, "on_gpu", False)

    gpu = Gpu.__new__(Gpu)
    gpu.name, gpu._caller = "cuda:0", None
    tensor = torch.rand(50)
    with pytest.raises(UnsupportedError, match="stage_cpu_tensors"):
        content_of(tensor, gpu, stage=False, copy_bytes=0)
    content = content_of(tensor, gpu, stage=True, copy_bytes=0)
    assert content.owned and content.memory is not None and content.memory.piece_bytes == 200
    meta = Announcement.unpack(Frame(FrameType.ANNOUNCE, 0, b"\x01\x00" + content.prefix)).meta
    with pytest.raises(UnsupportedError, match="stage_cpu_tensors"):
        check_out(tensor, meta, gpu, stage=False)
    check_out(tensor, meta, gpu, stage=True)


# -- where NCCL listens ---------------------------------------------------------------------------------


def test_nccl_is_bound_to_the_interface_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface.interface_of("127.0.0.1") == interface.interface_of("unix:") == "lo"
    monkeypatch.delenv(interface.VARIABLE, raising=False)
    monkeypatch.setattr(interface, "_bound", "")
    interface.bind_to("127.0.0.1")
    assert os.environ[interface.VARIABLE] == "=lo"
    monkeypatch.setenv(interface.VARIABLE, "eth7")
    interface.bind_to("127.0.0.1")
    assert os.environ[interface.VARIABLE] == "eth7"


def test_an_address_that_no_interface_has_is_refused() -> None:
    for host in ("203.0.113.77", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match="host"):
            interface.interface_of(host)
