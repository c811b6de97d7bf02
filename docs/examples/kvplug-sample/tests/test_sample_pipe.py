"""The law of a pipe, as far as this small one needs its own tests."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

import kvplug
import kvplug.wire.frames
from kvplug_sample.light import SampleOptions, describe
from kvplug_sample.pipe import SampleEndpoint

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


def endpoint(max_in_flight_bytes=64 * 1024 * 1024):
    options = SampleOptions(max_in_flight_bytes=max_in_flight_bytes)
    context = kvplug.PipeContext(options=options, credentials=kvplug.Credentials(), timeout_s=20.0)
    return SampleEndpoint(context)


@pytest.fixture
def pair():
    here = endpoint(max_in_flight_bytes=1000_000)
    listener = here.listen()
    one = here.connect(listener.contact)
    two = listener.accept()
    listener.close()
    yield one, two
    one.abort()
    two.abort()


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5), (2, 3, 4)], ids=str)
def test_tensors_arrive_with_every_bit(pair, dtype, shape):
    one, two = pair
    sent = (torch.arange(max(1, torch.Size(shape).numel())) % 2)[: torch.Size(shape).numel()]
    sent = sent.reshape(shape).to(dtype)
    one.send_tensor(sent).wait(5)
    received = two.recv_tensor()
    assert (received.shape, received.dtype) == (sent.shape, sent.dtype)
    assert bits(received) == bits(sent)


def test_none_is_a_message_and_the_order_is_kept(pair):
    one, two = pair
    one.send_tensor(torch.ones(2))
    one.send_tensor(None)
    one.send_tensor(torch.zeros(3).t())
    assert two.recv_tensor().tolist() == [1, 1]
    assert two.recv_tensor() is None
    assert two.recv_tensor().tolist() == [0, 0, 0]


def test_what_does_not_fit_is_refused_and_stays(pair):
    one, two = pair
    one.send_tensor(torch.arange(6.0).reshape(2, 3))
    with pytest.raises(kvplug.TensorMismatchError):
        two.recv_tensor(out=torch.empty(3, 2))
    out = torch.zeros(3, 2).t()  # not contiguous
    assert two.recv_tensor(out=out) is out
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_both_may_send_more_than_a_socket_holds_at_once(pair):
    big = torch.arange(3_000_000.0)
    transfers = [pipe.send_tensor(big) for pipe in pair]
    assert all(torch.equal(pipe.recv_tensor(), big) for pipe in pair)
    for transfer in transfers:
        transfer.wait(5)


def test_a_stopped_receiver_bounds_what_is_held_and_a_timeout_queues_nothing(pair):
    one, two = pair
    first = one.send_tensor(torch.zeros(2_000_000))  # larger than the limit: passes alone
    with pytest.raises(kvplug.TimeoutError):
        one.send_tensor(torch.ones(300_000), timeout=0.05)
    assert not first.done()
    assert two.recv_tensor().sum() == 0
    one.send_tensor(torch.full((2,), 7.0))
    assert two.recv_tensor().tolist() == [7, 7]


def test_a_receive_that_times_out_in_the_middle_is_resumed(pair):
    one, two = pair
    one._sock.send(bytes(kvplug.wire.frames.encode_header(kvplug.wire.frames.FrameKind.NONE, 0)[:9]))
    with pytest.raises(kvplug.TimeoutError):
        two.recv_tensor(timeout=0.05)
    one._sock.send(bytes(kvplug.wire.frames.encode_header(kvplug.wire.frames.FrameKind.NONE, 0)[9:]))
    assert two.recv_tensor() is None


def test_a_second_thread_in_one_direction_is_told(pair):
    _, two = pair

    def wait() -> None:
        with pytest.raises(kvplug.ClosedError):
            two.recv_tensor()

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not two._receiving._lock.locked():
        time.sleep(0.001)
    with pytest.raises(kvplug.BusyError):
        two.recv_tensor()
    two.abort()
    waiting.join(5)
    assert not waiting.is_alive()


def test_closing_sends_what_is_queued(pair):
    one, two = pair
    one.send_tensor(torch.ones(2_000_000))
    received = []
    reader = threading.Thread(target=lambda: received.append(two.recv_tensor()))
    reader.start()
    one.close(timeout=5)
    one.close()
    reader.join(5)
    assert received[0].sum() == 2_000_000
    with pytest.raises(kvplug.PeerGoneError):
        two.recv_tensor()
    with pytest.raises(kvplug.ClosedError):
        one.send_tensor(None)


def test_aborting_fails_what_is_queued(pair):
    one, _ = pair
    transfer = one.send_tensor(torch.ones(2_000_000))
    one.abort()
    with pytest.raises(kvplug.ClosedError):
        transfer.wait(5)


CHILD = """
import sys, torch, kvplug
from kvplug_sample.light import SampleOptions
from kvplug_sample.pipe import SampleEndpoint
context = kvplug.PipeContext(options=SampleOptions(), credentials=kvplug.Credentials(), timeout_s=20.0)
with SampleEndpoint(context).connect(sys.argv[1]) as pipe:
    while (tensor := pipe.recv_tensor(timeout=60)) is not None:
        pipe.send_tensor(tensor + 1)
"""


def test_another_process_echoes_and_its_death_wakes_whoever_waits():
    listener = endpoint().listen()
    child = subprocess.Popen([sys.executable, "-c", CHILD, listener.contact])
    pipe = listener.accept(timeout=30)
    listener.close()
    pipe.send_tensor(torch.tensor([1, 2]))
    assert pipe.recv_tensor().tolist() == [2, 3]

    killer = threading.Timer(0.2, child.kill)
    killer.start()
    with pytest.raises(kvplug.PeerGoneError):
        pipe.recv_tensor(timeout=30)
    with pytest.raises(kvplug.PeerGoneError):
        pipe.send_tensor(None)
    pipe.close()
    killer.join()
    child.wait(10)


def test_a_bare_address_of_another_purpose_is_no_way_in():
    other = kvplug.Listener.open("unix:", kvplug.Credentials(), "something else")
    with other, pytest.raises(kvplug.AuthenticationError):
        endpoint().connect(other.contact, timeout=5)


def test_the_probe_names_this_host():
    assert describe().viable
    assert describe() == describe()
