"""The start of a pipe "pynccl" that hangs, fails or is left by its peer."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import pynccl_ends as ends
from kvplug import ResourceExhaustedError, TimeoutError, TransportError
from kvplug.transport import Credentials, dial, this_process
from kvplug_lab.gpu.fake import GPU_VARIABLE, NCCL
from kvplug_pynccl import interface
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.nccl.errors import NcclError
from kvplug_pynccl.pipe import join
from kvplug_pynccl.pipe.contact import PyncclContact
from kvplug_testing import peers
from kvplug_testing.waits import Call, until

ENDS = Path(__file__).with_name("pynccl_ends.py")
local_pair = ends.local_pair

PATIENCE_S = ends.PATIENCE_S


def test_a_start_that_hangs_ends_at_the_deadline_and_the_listener_goes_on(
    fake_path: str, local_pair: Any, controls: Any
) -> None:
    end = ends.endpoint(fake_path)
    with end.listen() as listener:
        controls.set(init_hangs=1)
        with pytest.raises(TimeoutError, match="start of NCCL"):
            end.connect(listener.contact, timeout=0.5)
        controls.set(init_hangs=0)
        until(lambda: controls.get("communicators") == 0)
        connecting = Call(lambda: end.connect(listener.contact))
        with listener.accept() as one, connecting.result() as other:
            other.send_tensor(torch.arange(5))
            assert one.recv_tensor().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.full
def test_a_start_that_fails_says_at_both_ends_why(fake_path: str, controls: Any, caplog: Any) -> None:
    end = ends.endpoint(fake_path)
    with (
        end.listen() as listener,
        peers.start(
            f"{ENDS}:connects",
            *(fake_path, listener.contact),
            env=NCCL.environment(init_result=Result.INTERNAL_ERROR),
            timeout_s=PATIENCE_S,
        ) as child,
    ):
        assert child.result(PATIENCE_S).startswith("NcclInternalError: ")
        until(lambda: "was not completed" in caplog.text)
    assert "ncclInternalError" in caplog.text
    until(lambda: controls.get("communicators") == 0)


def test_two_ranks_on_one_gpu_get_an_error_that_says_so(
    fake_path: str, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_VARIABLE, "0")
    end = ends.endpoint(fake_path)
    with end.listen() as listener, pytest.raises(TransportError, match="same GPU") as raised:
        end.connect(listener.contact)
    assert isinstance(raised.value, NcclError) or "ncclInvalidUsage" in str(raised.value)
    until(lambda: controls.get("communicators") == 0)


@pytest.mark.parametrize("where", ["boot_id", "net_ns"])
def test_a_peer_elsewhere_gets_an_error_that_nccl_listens_on_loopback_only(
    fake_path: str, controls: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    elsewhere = attrs.evolve(this_process(), **{where: "another"})
    monkeypatch.setattr(interface, "this_process", lambda: elsewhere)
    end = ends.endpoint(fake_path)
    monkeypatch.setenv(interface.VARIABLE, "=lo")
    with (
        end.listen() as listener,
        pytest.raises(TransportError, match=f"loopback only.*{interface.VARIABLE}"),
    ):
        end.connect(listener.contact)
    assert controls.get("communicators") == 0
    monkeypatch.setenv(interface.VARIABLE, "=eth0")
    interface.check_reach(this_process())


@pytest.mark.full
def test_ends_with_two_releases_of_nccl_get_an_error_that_names_both(fake_path: str, controls: Any) -> None:
    end = ends.endpoint(fake_path)
    with (
        end.listen() as listener,
        peers.start(
            f"{ENDS}:connects",
            *(fake_path, listener.contact),
            env=NCCL.environment(version=22105),
            timeout_s=PATIENCE_S,
        ) as child,
    ):
        said = child.result(PATIENCE_S)
    assert "2.21.5" in said and "2.32.3" in said and "same release" in said


@pytest.mark.full
def test_a_peer_that_is_killed_while_nccl_starts_is_gone(fake_path: str, controls: Any) -> None:
    end = ends.endpoint(fake_path)
    with (
        end.listen() as listener,
        peers.start(
            f"{ENDS}:connects",
            *(fake_path, listener.contact),
            env=NCCL.environment(init_hangs=1),
            timeout_s=PATIENCE_S,
        ) as child,
    ):
        until(lambda: controls.get("communicators") == 1)
        child.kill()
        until(lambda: controls.get("communicators") == 0)


@pytest.mark.parametrize("then", ["hangs up", "says why", "lies"])
def test_an_end_that_was_ready_first_and_then_fails_is_noticed_while_nccl_starts(
    fake_path: str, controls: Any, nccl: Any, caplog: Any, then: str
) -> None:
    end = ends.endpoint(fake_path)
    with (
        end.listen() as listener,
        dial(PyncclContact.parse(listener.contact).reachable()[0], Credentials(), join.PURPOSE) as connection,
    ):
        connection.sock.sendall(join.Join(step=join.Step.HELLO, version=nccl.version.code).pack())
        until(lambda: controls.get("communicators") == 1)
        connection.sock.sendall(join.Join(step=join.Step.READY).pack())
        if then == "hangs up":
            connection.sock.shutdown(socket.SHUT_WR)
        elif then == "says why":
            connection.sock.sendall(
                join.Join(step=join.Step.FAILED, reason="its GPU fell off\n\x1b[2J").pack()
            )
        else:
            connection.sock.sendall(join.Join(step=join.Step.READY).pack())
        until(lambda: "was not completed" in caplog.text)
        until(lambda: controls.get("communicators") == 0)
    said = {
        "hangs up": "hung up",
        "says why": "its GPU fell off",
        "lies": "does not join",
    }
    assert said[then] in caplog.text


def test_a_pipe_that_finds_no_thread_leaves_nothing(
    fake_path: str, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ends.endpoint(fake_path)
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "kvplug-pynccl-pipe":
            raise RuntimeError("can't start new thread")
        start(thread)

    with end.listen() as listener:
        descriptors = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(threading.Thread, "start", started)
        with pytest.raises(ResourceExhaustedError, match="threads"):
            end.connect(listener.contact)
        until(lambda: controls.get("communicators") == 0)
        until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
