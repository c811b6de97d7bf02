"""What goes wrong beneath a pipe: the device fails or is busy, peers die or stop, memory cannot be mapped."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest
import torch

import cuda_ipc_ends as ends
from device_pipes import CHILD, assert_works, noise
from kvplug import PeerGoneError, ResourceExhaustedError, TimeoutError, TransportError
from kvplug_cuda_ipc.cudart.library import Runtime
from kvplug_cuda_ipc.pipe import pipe as pipes
from kvplug_lab.gpu.fake import CUDART
from kvplug_testing import peers
from kvplug_testing.comparison import assert_same
from kvplug_testing.waits import Call, until

pytestmark = pytest.mark.full
LARGE, MIB, PATIENCE_S = ends.LARGE, ends.MIB, ends.PATIENCE_S


# -- peers that die or stop ----------------------------------------------------------------------------


def test_a_copy_that_comes_to_its_end_after_its_peer_is_no_message(
    remote_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Any] = []
    copy = Runtime.memcpy_async
    monkeypatch.setattr(Runtime, "memcpy_async", lambda *given: (copies.append(given), copy(*given))[1])
    pipe, child = remote_pair("send", MIB)
    assert child.recv(PATIENCE_S) == "sent"
    controls.set(hold=1)
    receiving = Call(lambda: pipe.recv_tensor(timeout=PATIENCE_S))
    until(lambda: copies)
    child.kill()
    time.sleep(0.4)  # the call has seen it
    controls.set(hold=0)
    receiving.raised(PeerGoneError)
    with pytest.raises(PeerGoneError):
        pipe.recv_tensor(timeout=PATIENCE_S)


def test_ends_in_one_process_whose_connection_breaks_free_everything_at_once(
    local_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipes, "END_S", 1000 * PATIENCE_S)  # the end of this process is not awaited
    for one, other in (local_pair(), reversed(local_pair())):
        one.send_tensor(noise(MIB)).wait(PATIENCE_S)
        one.channel.socket().shutdown(socket.SHUT_RDWR)
        for pipe in (one, other):
            with pytest.raises(PeerGoneError):
                while True:
                    pipe.send_tensor(None)
            pipe.abort()
    until(lambda: controls.get("allocations") == 0)


@pytest.mark.parametrize(("ended", "then"), [("closed", "goes on"), ("aborted", "is killed")])
def test_memory_that_a_stopped_peer_has_mapped_is_kept_until_it_goes_on_or_ends(
    remote_pair: Any, controls: Any, ended: str, then: str
) -> None:
    pipe, child = remote_pair("wait")
    assert child.recv() == "here"
    child.stop()
    pipe.send_tensor(noise(MIB)).wait(PATIENCE_S)
    Call(pipe.abort if ended == "aborted" else lambda: pipe.close(timeout=0.2)).result()
    time.sleep(0.3)
    assert controls.get("allocations") == 1
    assert controls.get("mappings") == 0  # the peer's memory is unmapped already
    if then == "goes on":
        child.cont()
        child.send("go")
    else:
        child.kill()


def test_both_ends_unmap_before_anything_is_freed(remote_pair: Any, controls: Any, fake_path: str) -> None:
    pipe, child = remote_pair("counters", fake_path)
    assert child.recv() == "here"
    pipe.send_tensor(noise(MIB))
    pipe.close()
    assert child.result(PATIENCE_S) == dict.fromkeys(ends.COUNTERS, 0)


def test_ctrl_c_gives_the_callers_memory_back_and_breaks_the_pipe(remote_pair: Any) -> None:
    pipe, child = remote_pair("interrupted", LARGE, env=CUDART.environment(delay_us=30_000))
    assert child.recv(PATIENCE_S) == "here"
    pipe.send_tensor(noise(LARGE))
    time.sleep(0.3)
    os.kill(child.pid, signal.SIGINT)
    assert child.recv(PATIENCE_S) == "struck"
    child.send("look")
    first, second, kept = child.result(PATIENCE_S)
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("TransportError") and "interrupted in the middle of a message" in second
    assert kept == "True"
    with pytest.raises(PeerGoneError):
        pipe.recv_tensor(timeout=PATIENCE_S)


# -- the device ----------------------------------------------------------------------------------------


def test_a_device_that_fails_ends_both_pipes_with_cudas_error_here(
    remote_pair: Any, local_pair: Any, controls: Any
) -> None:
    pipe, child = remote_pair("echo")
    controls.set(fail_after=controls.get("copies") + 5)
    with pytest.raises(TransportError, match="cudaErrorIllegalAddress"):
        pipe.send_tensor(noise(LARGE)).wait(PATIENCE_S)
        pipe.recv_tensor(timeout=PATIENCE_S)
    for call in (lambda: pipe.recv_tensor(timeout=PATIENCE_S), lambda: pipe.send_tensor(None)):
        with pytest.raises(TransportError, match="cudaErrorIllegalAddress") as caught:
            call()
        assert not isinstance(caught.value, PeerGoneError)
    assert isinstance(child.result(PATIENCE_S), int)  # it has noticed that its peer is gone
    pipe.abort()
    controls.set(fail_after=-1, failed=0)
    assert_works(local_pair())


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_busy_device_delays_no_call_that_ends_a_pipe_and_what_has_failed_is_not_sent(
    local_pair: Any, controls: Any, how: str
) -> None:
    """Whatever the device was given, ending a pipe takes no longer: only freeing its memory waits."""
    one, other = local_pair()
    controls.set(hold=1)
    source = noise(MIB)
    transfer = one.send_tensor(source)
    for call in (lambda: other.recv_tensor(timeout=0.1), lambda: transfer.wait(0)):
        with pytest.raises(TimeoutError):
            call()
    Call(one.abort if how == "abort" else lambda: one.close(timeout=0.1)).result()
    assert transfer.done()
    source.fill_(0)  # the caller's again
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=PATIENCE_S)
    other.abort()
    assert controls.get("allocations") == 2
    controls.set(hold=0)
    until(lambda: controls.get("allocations") == 0)


# -- while a pipe is made ------------------------------------------------------------------------------


def test_both_ends_report_that_there_is_no_memory_and_the_listener_goes_on(
    fake_path: str, controls: Any, pipe_pairs: Any, caplog: Any, fork_server: Any
) -> None:
    with ends.endpoint(fake_path).listen() as listener:
        given = (f"{CHILD}connects", listener.contact, ends.__file__, fake_path)
        controls.set(malloc_result=2)
        with pytest.raises(ResourceExhaustedError, match="does not have enough free memory"):
            ends.endpoint(fake_path).connect(listener.contact)
        with fork_server.start(*given) as child:
            said = child.result(PATIENCE_S)
        assert said.startswith("ResourceExhaustedError")
        assert "cudaMalloc returned cudaErrorMemoryAllocation" in said
        assert " failed: " in caplog.text
        controls.set(malloc_result=0)
        with fork_server.start(*given) as child:
            with listener.accept() as pipe:
                assert_same(torch.arange(3), pipe.recv_tensor(timeout=PATIENCE_S))
            assert child.result(PATIENCE_S) == "connected"


@pytest.mark.parametrize("who", ["connecting", "accepting"])
def test_both_ends_report_memory_that_cannot_be_mapped_with_the_gpus(
    fake_path: str, controls: Any, pipe_pairs: Any, caplog: Any, who: str
) -> None:
    controls.set(gpu=0xAA)
    env = CUDART.environment(gpu=0xBB, open_result=205 if who == "connecting" else 0)
    with ends.endpoint(fake_path).listen() as listener:
        controls.set(open_result=205 if who == "accepting" else 0)
        given = (f"{CHILD}connects", listener.contact, ends.__file__, fake_path)
        with peers.start(*given, env=env) as child:
            said = child.result(PATIENCE_S)
        for text in (said, caplog.text):
            assert "cudaErrorMapBufferObjectFailed" in text
            assert "aa000000-" in text and "bb000000-" in text
        assert "namespaces" in said


def test_a_peer_that_is_stopped_while_a_pipe_is_made_keeps_what_it_may_have_mapped(
    fake_path: str, pipe_pairs: Any, fork_server: Any
) -> None:
    with ends.endpoint(fake_path).listen() as listener:
        given = (f"{CHILD}connects", listener.contact, ends.__file__, fake_path)
        for moment in range(6):
            with fork_server.start(*given) as child:
                time.sleep(0.002 * moment)
                child.stop()
                time.sleep(0.05)
                child.kill()
