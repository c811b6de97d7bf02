"""What goes wrong beneath a pipe: the device fails or is busy, peers die or stop, memory cannot be mapped."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cuda_ipc_ends as ends
from kvplug import KvplugError, PeerGoneError, ResourceExhaustedError, TimeoutError, TransportError
from kvplug.transport import Channel, Credentials, HeartbeatTerms, dial
from kvplug_cuda_ipc import peer_process
from kvplug_cuda_ipc.cudart.errors import CudaError
from kvplug_cuda_ipc.pipe import join
from kvplug_cuda_ipc.pipe.contact import CudaIpcContact
from kvplug_lab.gpu.cuda_ipc import HostDevice
from kvplug_lab.gpu.fake import CUDART
from kvplug_lab.gpu.host import HostStream
from kvplug_testing import peers
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.waits import Call, until

pytestmark = pytest.mark.full

ENDS = Path(__file__).with_name("cuda_ipc_ends.py")
local_pair, remote_pair = ends.local_pair, ends.remote_pair
LARGE, MIB, PATIENCE_S = ends.LARGE, ends.MIB, ends.PATIENCE_S


def noise(nbytes: int = LARGE) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def assert_works(pair: Any) -> None:
    one, other = pair
    for source, target in ((one, other), (other, one)):
        message = noise()
        source.send_tensor(message)
        assert_same(message, target.recv_tensor(timeout=PATIENCE_S))


# -- peers that die or stop ----------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 7, 20])
@pytest.mark.parametrize("into_out", [False, True])
def test_a_sender_that_dies_inside_a_copy_is_gone_for_its_receiver(
    remote_pair: Any, local_pair: Any, after: int, into_out: bool
) -> None:
    pipe, _ = remote_pair("send", LARGE, env=CUDART.environment(exit_after=after))
    out = torch.zeros(LARGE, dtype=torch.uint8) if into_out else None
    with pytest.raises(PeerGoneError):
        pipe.recv_tensor(out, timeout=PATIENCE_S)
    if out is not None:
        out.fill_(7)
    with pytest.raises(PeerGoneError):
        pipe.send_tensor(None)
    assert_works(local_pair())
    if out is not None:
        assert_filled(7, out)


def test_a_copy_that_comes_to_its_end_after_its_peer_is_no_message(remote_pair: Any, controls: Any) -> None:
    pipe, child = remote_pair("send", MIB)
    assert child.recv(PATIENCE_S) == "sent"
    controls.set(hold=1)
    receiving = Call(lambda: pipe.recv_tensor(timeout=PATIENCE_S))
    until(lambda: pipe._inbox._message)
    time.sleep(0.2)  # the copy is enqueued
    child.kill()
    until(lambda: pipe._lifecycle.peer_lost)
    time.sleep(0.2)  # the call has seen it
    controls.set(hold=0)
    assert isinstance(receiving.outcome(), PeerGoneError)
    with pytest.raises(PeerGoneError):
        pipe.recv_tensor(timeout=PATIENCE_S)


def test_ends_in_one_process_whose_connection_breaks_free_everything_at_once(
    local_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_process, "_END_S", 1000 * PATIENCE_S)  # the end of this process is not awaited
    for one, other in (local_pair(), reversed(local_pair())):
        one.send_tensor(noise(MIB)).wait(PATIENCE_S)
        one._channel.socket().shutdown(socket.SHUT_RDWR)
        for pipe in (one, other):
            until(lambda pipe=pipe: pipe._lifecycle.ended)
            pipe.abort()
            until(lambda pipe=pipe: not pipe._worker.is_alive())
    assert controls.get("allocations") == 0


@pytest.mark.parametrize("after", [0, 9])
def test_a_receiver_that_dies_inside_a_copy_ends_it_for_its_sender(remote_pair: Any, after: int) -> None:
    pipe, _ = remote_pair("echo", env=CUDART.environment(exit_after=after))
    transfer = pipe.send_tensor(noise())
    with pytest.raises(PeerGoneError):
        transfer.wait(PATIENCE_S)
    with pytest.raises(PeerGoneError):
        pipe.recv_tensor(timeout=PATIENCE_S)


@pytest.mark.parametrize("ended", ["closed", "aborted"])
@pytest.mark.parametrize("then", ["goes on", "is killed"])
def test_memory_that_a_stopped_peer_has_mapped_is_kept_until_it_goes_on_or_ends(
    remote_pair: Any, controls: Any, ended: str, then: str
) -> None:
    pipe, child = remote_pair("wait")
    assert child.recv() == "here"
    child.stop()
    assert pipe.send_tensor(noise(MIB)).wait(PATIENCE_S) is None
    if ended == "closed":
        assert Call(lambda: pipe.close(timeout=0.2)).outcome() is None
    else:
        assert Call(pipe.abort).outcome() is None
    time.sleep(0.3)
    assert controls.get("allocations") == 1
    assert controls.get("mappings") == 0  # the peer's memory is unmapped already
    if then == "goes on":
        child.cont()
        child.send("go")
    else:
        child.kill()
    until(lambda: controls.get("allocations") == 0)
    assert controls.get("freed_while_mapped") == 0


def test_both_ends_unmap_before_anything_is_freed(remote_pair: Any, controls: Any, fake_path: str) -> None:
    for how in ("close", "abort"):
        pipe, child = remote_pair("counters")
        child.send(fake_path)
        assert child.recv() == "here"
        pipe.send_tensor(noise(MIB))
        getattr(pipe, how)()
        assert child.result(PATIENCE_S) == {"allocations": 0, "mappings": 0, "freed_while_mapped": 0}
        until(lambda: controls.get("allocations") == controls.get("mappings") == 0)
        assert controls.get("freed_while_mapped") == 0


def test_memory_is_mapped_once_however_many_messages_there_are(remote_pair: Any, controls: Any) -> None:
    pipe, _ = remote_pair("echo")
    for nbytes in (1, 1000, LARGE, MIB):
        message = noise(nbytes)
        pipe.send_tensor(message)
        assert_same(message, pipe.recv_tensor(timeout=PATIENCE_S))
        assert (controls.get("allocations"), controls.get("mappings")) == (1, 1)


@pytest.mark.parametrize("into_out", [False, True])
def test_a_receive_that_runs_out_of_time_inside_a_message_is_resumed(
    remote_pair: Any, into_out: bool
) -> None:
    pipe, child = remote_pair("send", LARGE, env=CUDART.environment(delay_us=60_000))
    out = torch.zeros(LARGE, dtype=torch.uint8) if into_out else None
    with pytest.raises(TimeoutError, match=r"bytes of a tensor have arrived|no message has arrived"):
        pipe.recv_tensor(out, timeout=0.4)
    child.stop()
    late = 0
    while True:
        if out is not None:
            out.fill_(9)  # the caller's meanwhile
        try:
            came = pipe.recv_tensor(out, timeout=0.2)
            break
        except TimeoutError:
            late += 1
            child.cont()
    assert_filled(1, came)
    assert late


def test_where_no_death_can_be_seen_silence_counts_as_one_and_a_quiet_peer_is_not_silent(
    fake_path: str, controls: Any, fork_server: Any
) -> None:
    with (
        ends.endpoint(fake_path, heartbeat_timeout_s=2.0).listen() as listener,
        fork_server.start(
            f"{ENDS}:mute", fake_path, listener.contact, 2.0, timeout_s=4 * PATIENCE_S
        ) as child,
        listener.accept() as pipe,
    ):
        time.sleep(3.0)
        pipe.send_tensor(torch.arange(3))
        assert_same(torch.arange(3), pipe.recv_tensor(timeout=PATIENCE_S))
        child.stop()
        with pytest.raises(PeerGoneError, match="silent"):
            pipe.recv_tensor(timeout=PATIENCE_S)
    until(lambda: controls.get("allocations") == 0)


def test_ctrl_c_gives_the_callers_memory_back_and_breaks_the_pipe(remote_pair: Any) -> None:
    pipe, child = remote_pair("interrupted", env=CUDART.environment(delay_us=30_000))
    assert child.recv(PATIENCE_S) == "here"
    pipe.send_tensor(noise())
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


@pytest.mark.parametrize("at", [0, 5])
def test_a_device_that_fails_ends_both_pipes_with_cudas_error_here(
    remote_pair: Any, local_pair: Any, controls: Any, at: int
) -> None:
    pipe, child = remote_pair("echo")
    controls.set(fail_after=controls.get("copies") + at)
    with pytest.raises(TransportError, match="cudaErrorIllegalAddress"):
        pipe.send_tensor(noise()).wait(PATIENCE_S)
        pipe.recv_tensor(timeout=PATIENCE_S)
    for call in (lambda: pipe.recv_tensor(timeout=PATIENCE_S), lambda: pipe.send_tensor(None)):
        with pytest.raises(TransportError, match="cudaErrorIllegalAddress") as caught:
            call()
        assert not isinstance(caught.value, PeerGoneError)
    assert isinstance(child.result(PATIENCE_S), int)  # it has noticed that its peer is gone
    pipe.abort()
    controls.set(fail_after=-1, failed=0)
    assert_works(local_pair())


def test_a_copy_that_is_refused_breaks_the_pipe(local_pair: Any, controls: Any) -> None:
    one, other = local_pair()
    controls.set(copy_result=1)
    with pytest.raises(CudaError, match="cudaMemcpyAsync returned cudaErrorInvalidValue"):
        one.send_tensor(noise(100))
    controls.set(copy_result=0)
    with pytest.raises(TransportError, match="a message was not begun"):
        one.send_tensor(None)
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=PATIENCE_S)


def test_a_busy_device_delays_no_call_that_ends_a_pipe(local_pair: Any, controls: Any) -> None:
    """Whatever the device was given, ending a pipe takes no longer: only freeing its memory waits."""
    for how in ("close", "abort"):
        one, other = local_pair()
        controls.set(hold=1)
        transfer = one.send_tensor(noise())
        with pytest.raises(TimeoutError):
            other.recv_tensor(timeout=0.1)
        with pytest.raises(TimeoutError):
            transfer.wait(0)
        running = Call(lambda p=one, h=how: p.close(timeout=0.1) if h == "close" else p.abort())
        assert running.outcome() is None
        assert transfer.done()
        with pytest.raises(PeerGoneError):
            other.recv_tensor(timeout=PATIENCE_S)
        other.abort()
        assert controls.get("allocations") == 2
        controls.set(hold=0)
        until(lambda: controls.get("allocations") == 0)


def test_a_transfer_that_has_failed_sends_nothing_more(local_pair: Any, controls: Any) -> None:
    one, other = local_pair()
    controls.set(hold=1)
    source = noise(1000)
    transfer = one.send_tensor(source)
    one.abort()
    assert transfer.done()
    source.fill_(0)  # the caller's again
    controls.set(hold=0)
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=PATIENCE_S)


# -- while a pipe is made ------------------------------------------------------------------------------


def test_both_ends_report_that_there_is_no_memory_and_the_listener_goes_on(
    fake_path: str, controls: Any, caplog: Any, fork_server: Any
) -> None:
    with ends.endpoint(fake_path).listen() as listener:
        controls.set(malloc_result=2)
        with pytest.raises(ResourceExhaustedError, match="does not have enough free memory"):
            ends.endpoint(fake_path).connect(listener.contact)
        with fork_server.start(f"{ENDS}:connects", fake_path, listener.contact) as child:
            said = child.result(PATIENCE_S)
        assert (
            said.startswith("ResourceExhaustedError")
            and "cudaMalloc returned cudaErrorMemoryAllocation" in said
        )
        assert "was not completed" in caplog.text
        controls.set(malloc_result=0)
        with fork_server.start(f"{ENDS}:connects", fake_path, listener.contact) as child:
            with listener.accept() as pipe:
                assert_same(torch.arange(3), pipe.recv_tensor(timeout=PATIENCE_S))
            assert child.result(PATIENCE_S) == "connected"
    until(lambda: controls.get("allocations") == controls.get("mappings") == 0)
    assert controls.get("freed_while_mapped") == 0


@pytest.mark.parametrize("who", ["connecting", "accepting"])
def test_both_ends_report_memory_that_cannot_be_mapped_with_the_gpus(
    fake_path: str, controls: Any, caplog: Any, who: str
) -> None:
    controls.set(gpu=0xAA)
    env = CUDART.environment(gpu=0xBB, open_result=205 if who == "connecting" else 0)
    with ends.endpoint(fake_path).listen() as listener:
        controls.set(open_result=205 if who == "accepting" else 0)
        with peers.start(f"{ENDS}:connects", fake_path, listener.contact, env=env) as child:
            said = child.result(PATIENCE_S)
        for text in (said, caplog.text):
            assert "cudaErrorMapBufferObjectFailed" in text
            assert "aa000000-" in text and "bb000000-" in text
        assert "namespaces" in said
        until(lambda: controls.get("allocations") == controls.get("mappings") == 0)
        assert controls.get("freed_while_mapped") == 0


def test_memory_that_is_gone_with_its_process_means_that_the_peer_is_gone(
    fake_path: str, controls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hello = join.Hello(
        gpu="GPU-7", token=bytes(16), handle=bytes(64), nbytes=MIB, terms=HeartbeatTerms(True, 1000)
    )
    with ends.endpoint(fake_path).listen() as listener:
        channel = Channel(
            dial(CudaIpcContact.parse(listener.contact).reachable()[0], Credentials(), join.PURPOSE)
        )
        channel.send(hello.encode())
        join.Hello.decode(channel.recv(PATIENCE_S))
        channel.close()
        until(lambda: "has ended, and its memory with it" in caplog.text)
    until(lambda: controls.get("allocations") == 0)


def test_a_peer_that_is_stopped_while_a_pipe_is_made_keeps_what_it_may_have_mapped(
    fake_path: str, controls: Any, fork_server: Any
) -> None:
    with ends.endpoint(fake_path).listen() as listener:
        for moment in range(6):
            with fork_server.start(f"{ENDS}:connects", fake_path, listener.contact) as child:
                time.sleep(0.002 * moment)
                child.stop()
                time.sleep(0.05)
                child.kill()
        listener.close()
    until(lambda: controls.get("allocations") == controls.get("mappings") == 0)
    assert controls.get("freed_while_mapped") == 0


@pytest.mark.parametrize("lacks", ["threads", "streams"])
def test_a_pipe_without_threads_or_streams_is_not_made_and_its_memory_is_freed(
    fake_path: str, controls: Any, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    streams: list[HostStream] = []
    closed: list[HostStream] = []
    make, close, start = HostDevice.new_stream, HostStream.close, threading.Thread.start

    def new_stream(device: HostDevice) -> HostStream:
        if lacks == "streams" and streams:
            raise TransportError("there are no more streams")
        streams.append(make(device))
        return streams[-1]

    def start_thread(thread: threading.Thread) -> None:
        if lacks == "threads" and thread.name == "kvplug-cuda-ipc-work":
            raise RuntimeError("can't start new thread")
        start(thread)

    def close_stream(stream: HostStream) -> None:
        closed.append(stream)
        close(stream)

    monkeypatch.setattr(HostDevice, "new_stream", new_stream)
    monkeypatch.setattr(HostStream, "close", close_stream)
    monkeypatch.setattr(threading.Thread, "start", start_thread)
    end = ends.endpoint(fake_path)
    with end.listen() as listener, pytest.raises(TransportError, match=f"needs threads|more {lacks}"):
        end.connect(listener.contact)
    until(lambda: controls.get("allocations") == 0)
    assert streams and set(closed) == set(streams)


def test_a_call_ends_with_an_error_of_kvplugs_when_the_peer_is_killed(remote_pair: Any) -> None:
    pipe, child = remote_pair("echo")
    running = Call(lambda: pipe.recv_tensor(timeout=None))
    child.kill()
    assert isinstance(running.outcome(), KvplugError)


def test_memory_of_callers_is_filled_only_when_their_stream_has_done_with_it(
    local_pair: Any, fake_path: str, controls: Any
) -> None:
    caller = controls.stream()
    one, other = local_pair(device=HostDevice(fake_path, caller))
    one.send_tensor(torch.ones(1000, dtype=torch.uint8)).wait(PATIENCE_S)
    out = torch.zeros(1000, dtype=torch.uint8)
    controls.set(gate=1)
    caller.put_gate()
    with pytest.raises(TimeoutError):
        other.recv_tensor(out, timeout=0.2)
    assert_filled(0, out)
    assert_same(torch.ones(1000, dtype=torch.uint8), other.recv_tensor(timeout=PATIENCE_S))
    controls.set(gate=0)
    caller.close()
