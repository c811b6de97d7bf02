"""What goes in comes out: every dtype and shape, in order, into memory old and new."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvplug import TensorMismatchError, TimeoutError, UnsupportedError

NAMES = """
    bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32
    complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
    float4_e2m1fn_x2
"""
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


def bits(tensor: torch.Tensor) -> bytes:
    from kvplug.wire.tensors import memory_of

    return bytes(memory_of(tensor))


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.bool)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def test_every_dtype_and_shape_comes_back_from_another_process_bit_for_bit(far_pair: Any) -> None:
    pipe, _ = far_pair("echo", split_bytes=100_000)
    shapes: list[tuple[int, ...]] = [(), (0,), (0, 3), (5,), (2, 3, 4), (1,) * 12, (300, 500)]
    for dtype in DTYPES:
        for shape in shapes:
            sent = noise(shape, dtype)
            pipe.send_tensor(sent)
            assert same(pipe.recv_tensor(), sent), (dtype, shape)


def test_none_is_a_message(far_pair: Any) -> None:
    pipe, _ = far_pair("echo")
    for message in (None, torch.ones(2), None, None):
        pipe.send_tensor(message).wait(5)
    assert [pipe.recv_tensor() is None for _ in range(4)] == [True, False, True, True]


def test_non_contiguous_conjugated_and_expanded_tensors_arrive_as_they_read(far_pair: Any) -> None:
    pipe, _ = far_pair("echo", split_bytes=100_000)
    base = torch.randn(400, 300)
    for sent in (
        base.t(),
        base[::2, 1::3],
        base[0].expand(500, 300),
        torch.randn(9, dtype=torch.complex64).conj(),
        torch.randn(9, dtype=torch.complex64).conj().imag,
    ):
        pipe.send_tensor(sent)
        got = pipe.recv_tensor()
        assert got is not None
        assert torch.equal(got, sent.contiguous())


def test_tensors_larger_than_any_buffer_arrive_whole(far_pair: Any) -> None:
    pipe, _ = far_pair("echo")
    sent = torch.randint(0, 255, (40_000_003,), dtype=torch.uint8)
    out = torch.empty_like(sent)
    for _ in range(2):
        transfer = pipe.send_tensor(sent)
        assert pipe.recv_tensor(out) is out
        assert torch.equal(out, sent)
        out.zero_()
        transfer.wait(5)


@pytest.mark.parametrize("connections", [1, 3])
def test_any_number_of_connections_carries_the_same_bytes(near_pair: Any, connections: int) -> None:
    one, other = near_pair(connections=connections, split_bytes=1)
    for size in (1, 4095, 4096, 4097, 8192, 100_001, 3_000_000):
        sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
        one.send_tensor(sent)
        assert torch.equal(other.recv_tensor(), sent)


def test_the_smaller_number_of_connections_counts(socket_kind: str, endpoint: Any) -> None:
    with endpoint(socket_kind, connections=4).listen() as listener:
        one = endpoint(socket_kind, connections=2).connect(listener.contact)
        other = listener.accept()
        sent = torch.arange(1_000_000)
        one.send_tensor(sent)
        assert torch.equal(other.recv_tensor(), sent)
        one.abort()
        other.abort()


def test_order_holds_under_load_in_both_directions_at_once(far_pair: Any) -> None:
    count, nbytes = 300, 30_000
    pipe, child = far_pair("both_ways", count, nbytes, split_bytes=50_000, max_in_flight_bytes=200_000)
    failures: list[str] = []

    def send() -> None:
        for number in range(count):
            pipe.send_tensor(torch.full((nbytes * (number % 3) + 8,), number % 251, dtype=torch.uint8))

    thread = threading.Thread(target=send)
    thread.start()
    for number in range(count):
        got = pipe.recv_tensor()
        if got.numel() != nbytes * (number % 3) + 8 or not (got == number % 251).all():
            failures.append(f"message {number}")
    thread.join(20)
    assert not failures
    assert child.recv() == "all received"
    child.send("go")
    assert child.result() is True


def test_messages_sent_before_a_polite_close_are_all_received(far_pair: Any) -> None:
    pipe, child = far_pair("send_numbers", 50, 200_000)
    for number in range(50):
        got = pipe.recv_tensor()
        assert got.numel() == 200_000
        assert (got == number % 251).all()
    with pytest.raises(ConnectionError, match="closed"):
        pipe.recv_tensor()
    child.result()


def test_the_caller_may_overwrite_the_source_once_the_transfer_is_done(near_pair: Any) -> None:
    one, other = near_pair()
    source = torch.ones(5_000_000)
    transfer = one.send_tensor(source)
    assert not transfer.done()
    got = other.recv_tensor()
    transfer.wait(5)
    source.zero_()
    assert bool((got == 1).all())


def test_the_pipe_keeps_the_source_alive(near_pair: Any) -> None:
    one, other = near_pair()
    one.send_tensor(torch.full((5_000_000,), 7.0))
    assert bool((other.recv_tensor() == 7).all())


# -- out= ---------------------------------------------------------------------------------------


def test_out_is_filled_and_returned_whether_contiguous_or_not(near_pair: Any) -> None:
    one, other = near_pair()
    sent = torch.randn(700, 900)
    for out in (torch.empty(700, 900), torch.empty(900, 700).t(), torch.empty(1400, 900)[::2]):
        one.send_tensor(sent)
        assert other.recv_tensor(out) is out
        assert torch.equal(out, sent)


def test_only_the_view_that_was_given_as_out_is_written(near_pair: Any) -> None:
    one, other = near_pair(split_bytes=4096)
    memory = torch.zeros(50_000)
    one.send_tensor(torch.ones(20_000))
    other.recv_tensor(memory[10_000:30_000])
    assert memory[:10_000].sum() == 0
    assert memory[10_000:30_000].sum() == 20_000
    assert memory[30_000:].sum() == 0


def test_a_message_that_does_not_fit_out_stays(near_pair: Any) -> None:
    one, other = near_pair(split_bytes=4096)
    sent = torch.randn(50, 60)
    one.send_tensor(sent)
    one.send_tensor(None)
    for wrong in (torch.empty(60, 50), torch.empty(50, 60, dtype=torch.float64), torch.empty(3000)):
        with pytest.raises(TensorMismatchError, match=r"float32 of shape \[50, 60\]"):
            other.recv_tensor(wrong)
    with pytest.raises(UnsupportedError):
        other.recv_tensor(torch.empty(50, 60, device="meta"))
    assert torch.equal(other.recv_tensor(torch.empty(50, 60)), sent)
    with pytest.raises(TensorMismatchError, match="None"):
        other.recv_tensor(torch.empty(1))
    assert other.recv_tensor() is None


# -- deadlines ----------------------------------------------------------------------------------


def test_a_receive_that_times_out_before_the_first_byte_loses_nothing(near_pair: Any) -> None:
    one, other = near_pair()
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError):
            other.recv_tensor(timeout=timeout)
    one.send_tensor(torch.arange(3))
    assert torch.equal(other.recv_tensor(timeout=0.5), torch.arange(3))


@pytest.mark.parametrize("first_out", [False, True])
@pytest.mark.parametrize("second_out", [False, True])
def test_a_receive_that_times_out_in_the_middle_goes_on_in_the_next_call(
    near_pair: Any, first_out: bool, second_out: bool
) -> None:
    from kvplug_cpu.message import Content, parts

    one, other = near_pair(split_bytes=100_000)
    sent = torch.randint(0, 255, (2_000_000,), dtype=torch.uint8)
    content = Content.of(sent, 100_000)
    assert content.split
    (a, b), (c, d) = parts(2_000_000, 2)
    first, second = one._lanes
    assert first.send_now([memoryview(content.prefix), content.memory[a : a + 50_000]])
    assert second.send_now([content.memory[c : c + 20_000]])
    out = torch.zeros_like(sent)
    with pytest.raises(TimeoutError, match="of 2000000 bytes"):
        other.recv_tensor(out if first_out else None, timeout=0.2)
    out.fill_(99)  # the caller's own again
    rest = [
        threading.Thread(target=lambda: send_all(first, content.memory[a + 50_000 : b])),
        threading.Thread(target=lambda: send_all(second, content.memory[c + 20_000 : d])),
    ]
    for thread in rest:
        thread.start()
    if second_out:
        fresh = torch.empty_like(sent)
        assert other.recv_tensor(fresh) is fresh
        assert torch.equal(fresh, sent)
    else:
        assert torch.equal(other.recv_tensor(), sent)
    for thread in rest:
        thread.join()
    assert bool((out == 99).all()), "memory was written to after its call had ended"


def send_all(lane: Any, view: memoryview) -> None:
    while view:
        view = view[lane.send([view]) :]


def test_tensors_that_are_not_carried_are_refused_and_nothing_is_queued(near_pair: Any) -> None:
    one, other = near_pair()
    for wrong in (
        torch.empty(2, device="meta"),
        torch.eye(3).to_sparse(),
        [1, 2],
    ):
        with pytest.raises(UnsupportedError):
            one.send_tensor(wrong)
    one.send_tensor(None)
    assert other.recv_tensor() is None
