"""The start of a pipe "pynccl": what is refused, and NCCL that hangs, fails or is left by its peer."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

import pynccl_ends as ends
from device_pipes import CHILD
from kvplug import ConfigError, TimeoutError, TransportError, UnsupportedError
from kvplug.transport import Channel, Connection, Credentials, PeerIdentity
from kvplug_lab.gpu.fake import GPU_VARIABLE, NCCL
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl import interface
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.nccl.errors import NcclError
from kvplug_pynccl.pipe import join
from kvplug_pynccl.pipe.contact import PyncclContact
from kvplug_testing import peers
from kvplug_testing.waits import Call, until

PATIENCE_S = ends.PATIENCE_S


def test_a_start_that_hangs_ends_at_the_deadline_and_the_listener_goes_on(
    fake_path: str, controls: Any, pipe_pairs: Any
) -> None:
    end = ends.endpoint(fake_path)
    with end.listen() as listener:
        controls.set(init_hangs=1)
        with pytest.raises(TimeoutError, match="start of NCCL"):
            end.connect(listener.contact, timeout=0.5)
        controls.set(init_hangs=0)
        connecting = Call(lambda: end.connect(listener.contact))
        with listener.accept() as one, connecting.result() as other:
            other.send_tensor(torch.arange(5))
            assert one.recv_tensor().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "words", "here"),
    [
        ({"init_result": Result.INTERNAL_ERROR}, ["NcclInternalError: "], "ncclInternalError"),
        ({"version": 22105}, ["2.21.5", "2.32.3", "same release"], "same release"),
        ({"init_hangs": 1}, None, "is gone"),
    ],
    ids=["fails", "of another release", "is killed"],
)
def test_when_the_start_fails_at_one_end_both_know_why_and_nothing_is_left(
    fake_path: str,
    controls: Any,
    pipe_pairs: Any,
    caplog: Any,
    faults: dict[str, int],
    words: list[str] | None,
    here: str,
) -> None:
    end = ends.endpoint(fake_path)
    with (
        end.listen() as listener,
        peers.start(
            f"{CHILD}connects",
            *(listener.contact, ends.__file__, fake_path),
            env=NCCL.environment(**faults),
            timeout_s=PATIENCE_S,
        ) as child,
    ):
        if words is None:
            until(lambda: controls.get("communicators") == 1)
            child.kill()
        else:
            said = child.result(PATIENCE_S)
            assert all(word in said for word in words)
        until(lambda: " failed: " in caplog.text)
        assert here in caplog.text


def test_two_ranks_on_one_gpu_get_an_error_that_says_so(
    fake_path: str, pipe_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_VARIABLE, "0")
    end = ends.endpoint(fake_path)
    with end.listen() as listener, pytest.raises(TransportError, match="same GPU") as raised:
        end.connect(listener.contact)
    assert isinstance(raised.value, NcclError) or "ncclInvalidUsage" in str(raised.value)


@pytest.mark.parametrize("where", ["boot_id", "net_ns"])
def test_a_peer_elsewhere_gets_an_error_that_nccl_listens_on_loopback_only(
    fake_path: str, controls: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    elsewhere = attrs.evolve(PeerIdentity.of_this_process(), **{where: "another"})
    monkeypatch.setattr(interface, "PeerIdentity", SimpleNamespace(of_this_process=lambda: elsewhere))
    end = ends.endpoint(fake_path)
    monkeypatch.setenv(interface.VARIABLE, "=lo")
    with (
        end.listen() as listener,
        pytest.raises(TransportError, match=f"loopback only.*{interface.VARIABLE}"),
    ):
        end.connect(listener.contact)
    assert controls.get("communicators") == 0
    monkeypatch.setenv(interface.VARIABLE, "=eth0")
    interface.check_reach(PeerIdentity.of_this_process())


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (None, "is gone"),
        ({"failed": "its GPU fell off\n\x1b[2J"}, "its GPU fell off"),
        ("ready", "does not join"),
    ],
    ids=["hangs up", "says why", "lies"],
)
def test_an_end_that_was_ready_first_and_then_fails_is_noticed_while_nccl_starts(
    fake_path: str, controls: Any, pipe_pairs: Any, nccl: Any, caplog: Any, then: Any, words: str
) -> None:
    with (
        ends.endpoint(fake_path).listen() as listener,
        contextlib.closing(
            Channel(
                Connection.dial(
                    PyncclContact.parse(listener.contact).reachable()[0], Credentials(), join.PURPOSE
                )
            )
        ) as channel,
    ):
        channel.send({"sees_death": True, "heartbeat_ms": 100, "own": {"version": nccl.version.code}})
        until(lambda: controls.get("communicators") == 1)
        if then != "ready":
            channel.send(True)
        if then is None:
            channel.close()
        else:
            channel.send(then)
        until(lambda: " failed: " in caplog.text)
    assert words in caplog.text


# -- what is refused -----------------------------------------------------------------------------------


def test_a_cpu_tensor_on_a_pipe_of_gpus_is_refused_by_name(fake_path: str) -> None:
    class Gpu(HostDevice):
        name = "cuda:0"

    gpu, tensor = Gpu(fake_path), torch.rand(50)
    with pytest.raises(UnsupportedError, match="stage_cpu_tensors"):
        gpu.check(tensor, "sends")
    gpu.stages_cpu_tensors = True
    gpu.check(tensor, "receives into")
    assert not gpu.holds(tensor)


def test_a_cpu_tensor_is_staged_both_ways(pipe_pairs: Any, fake_path: str) -> None:
    class Gpu(HostDevice):
        uploaded = 0

        def holds(self, tensor: Any) -> bool:
            return False

        def staged(self, tensor: Any) -> Any:
            self.uploaded += 1
            return tensor.clone()

    gpu, out = Gpu(fake_path), torch.zeros(50)
    one, other = pipe_pairs.local(ends.endpoint(fake_path, device=gpu, stage_cpu_tensors=True))
    message = torch.rand(50)
    one.send_tensor(message)
    assert other.recv_tensor(out, timeout=PATIENCE_S) is out
    assert torch.equal(message, out) and gpu.uploaded == 1


# -- where NCCL listens ---------------------------------------------------------------------------------


def test_nccl_is_bound_to_the_interface_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface.interface_of("127.0.0.1") == interface.interface_of("unix:") == "lo"
    monkeypatch.setenv(interface.VARIABLE, "")  # as if it were not set; what it was comes back
    monkeypatch.setattr(interface, "_bound", "")
    interface.bind_to("127.0.0.1")
    assert os.environ[interface.VARIABLE] == "=lo"
    monkeypatch.setenv(interface.VARIABLE, "eth7")
    interface.bind_to("127.0.0.1")
    assert os.environ[interface.VARIABLE] == "eth7"
    for host in ("203.0.113.77", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match="host"):
            interface.interface_of(host)
