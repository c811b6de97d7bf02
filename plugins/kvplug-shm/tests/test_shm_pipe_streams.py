"""Messages through rings of all sizes: every place where one may begin, wrap, be cut or be resumed."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st

import shm_pipe_ends as ends
from kvplug import TimeoutError
from kvplug.net.wire.messages import tensor_prefix
from kvplug_shm.pipe.geometry import LINE, SMALLEST_BYTES, lines
from kvplug_testing import peers
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.waits import Call, until

local_pair, by_hand = ends.local_pair, ends.by_hand
compiled_only = pytest.mark.parametrize("local_pair", [True], indirect=True)

MIB = 1024 * 1024


def bytes_of(nbytes: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def exchange(one: Any, other: Any, messages: list[Any], into: bool = False) -> None:
    """Send all messages at once while the other end receives them."""
    sending = Call(lambda: [one.send_tensor(each) for each in messages])
    for each in messages:
        out = None if each is None or not into else torch.empty_like(each)
        got = other.recv_tensor(out)
        assert (got is None) if each is None else torch.equal(got, each)
    for transfer in sending.result():
        transfer.wait(ends.PATIENCE_S)


@pytest.mark.parametrize("into", [False, True])
def test_a_message_may_begin_at_every_place_of_a_ring(local_pair: Any, into: bool) -> None:
    one, other = local_pair(**ends.TINY)
    places, at = ends.TINY["slot_bytes"] // LINE, 0
    for begin in range(places):
        for nbytes in (1, LINE - 1, LINE, 400, ends.TINY["slot_bytes"], 3000):
            count = (begin - at) % places  # messages of one line
            exchange(one, other, [None] * count + [bytes_of(nbytes, begin)], into)
            at += count + 1 + lines(nbytes) // LINE


def test_the_longest_prefix_may_begin_at_every_place_of_the_smallest_ring(local_pair: Any) -> None:
    tensor = torch.arange(24, dtype=torch.int64).reshape((1,) * 61 + (2, 3, 4))
    assert lines(len(tensor_prefix(tensor.dtype, tensor.shape, tensor.nbytes))) < SMALLEST_BYTES
    for begin in range(SMALLEST_BYTES // LINE):
        one, other = local_pair(**ends.TINY)
        exchange(one, other, [*[None] * begin, tensor, tensor[..., :0], tensor])


@settings(max_examples=3 * settings.default.max_examples // 10, deadline=None)
@given(
    sizes=st.lists(st.none() | st.integers(0, 5000), min_size=1, max_size=25),
    slots=st.integers(1, 3),
    slot_bytes=st.integers(1024, 3000),
    spin_us=st.sampled_from([0, 50]),
    into=st.booleans(),
)
def test_any_messages_go_through_any_ring(
    sizes: list[int | None], slots: int, slot_bytes: int, spin_us: int, into: bool
) -> None:
    end = ends.endpoint(slots=slots, slot_bytes=slot_bytes, spin_us=spin_us)
    with end.listen() as listener, end.connect(listener.contact) as one, listener.accept() as other:
        messages = [None if size is None else bytes_of(size, n) for n, size in enumerate(sizes)]
        exchange(one, other, messages, into)
        exchange(other, one, messages, into)


@pytest.mark.parametrize("first_out", [False, True])
@pytest.mark.parametrize("second_out", [False, True])
def test_a_receive_that_times_out_in_the_middle_goes_on_in_the_next_call(
    by_hand: Any, first_out: bool, second_out: bool
) -> None:
    peer, other = by_hand(slots=2, slot_bytes=4096)
    sent = bytes_of(20_000, 1)
    content = ends.content_of(sent)
    peer.lay(ends.prefix_of(sent) + content[:2048])
    out = torch.zeros_like(sent)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="of 20000 bytes"):
            other.recv_tensor(out if first_out else None, timeout=0.1)
        out.fill_(99)  # the caller's own again
    sending = Call(lambda: peer.lay_all(content[2048:]))
    fresh = torch.empty_like(sent) if second_out else None
    got = other.recv_tensor(fresh)
    assert fresh is None or got is fresh
    assert_same(sent, got)
    sending.result()
    assert_filled(99, out, "memory was written to after its call had ended")


# -- memory ----------------------------------------------------------------------------------------


def test_a_pipe_says_how_much_memory_it_holds_and_uses_what_it_received_into_again(local_pair: Any) -> None:
    one, other = local_pair(slots=2, slot_bytes=MIB)
    assert attrs.astuple(one.held) == (4 * MIB, 0, 0, 0)
    source = torch.zeros(9 * MIB, dtype=torch.uint8)
    gone = weakref.ref(source)
    one.send_tensor(source)
    del source
    assert one.held.queued == 9 * MIB
    tensor = other.recv_tensor()
    until(lambda: one.held.queued == 0 and gone() is None)
    assert other.held.lent >= tensor.nbytes
    address = tensor.data_ptr()
    del tensor
    assert other.held.lent == 0
    assert other.held.idle >= 9 * MIB
    one.send_tensor(torch.ones(8 * MIB, dtype=torch.uint8))
    assert other.recv_tensor().data_ptr() == address
    one.abort()
    other.abort()
    assert one.held.shared == other.held.shared == 0


@compiled_only
@pytest.mark.parametrize("start", [0, 1, 63])
def test_a_message_that_passes_the_caches_fills_its_target_and_nothing_beside(
    local_pair: Any, start: int
) -> None:
    """On a processor with large caches that is one of more than 32 MiB."""
    one, other = local_pair()
    source = torch.arange(33 * MIB // 4 + 1, dtype=torch.int32).view(torch.uint8)
    around = torch.full((source.nbytes + 128,), 0xA5, dtype=torch.uint8)
    target = around[start : start + source.nbytes]
    sending = Call(lambda: one.send_tensor(source))
    other.recv_tensor(target)
    sending.result().wait(ends.PATIENCE_S)
    assert_same(source, target)
    assert_filled(0xA5, around[:start])
    assert_filled(0xA5, around[start + source.nbytes :])


@compiled_only
@pytest.mark.parametrize("row_bytes", [2048, 2049, 6000])
def test_blocks_that_pass_the_caches_fill_their_rows_and_nothing_beside(
    local_pair: Any, row_bytes: int
) -> None:
    one, other = local_pair()
    count = 17 * MIB // row_bytes
    source = torch.arange(count * row_bytes).to(torch.uint8).view(count, row_bytes)
    target = torch.full((count + 1, row_bytes + 3), 0xA5, dtype=torch.uint8)
    sending = Call(lambda: one.send_blocks([source], range(count)))
    other.recv_blocks([target[:, :row_bytes]], range(count, 0, -1))
    sending.result().wait(ends.PATIENCE_S)
    assert_same(source, target[1:, :row_bytes].flip(0))
    assert_filled(0xA5, target[0])
    assert_filled(0xA5, target[:, row_bytes:])


def test_a_pipe_has_one_socket_and_a_pidfd_and_its_memory_goes_with_it(local_pair: Any) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:kvplug-pipe")

    gc.collect()
    until(lambda: not mappings())  # of pipes of other tests
    first = local_pair()  # the watcher and the listener have descriptors of their own
    before = peers.Resources.of().descriptors
    one, other = local_pair()
    one.send_tensor(bytes_of(20 * MIB, 1))
    other.recv_tensor()
    more = peers.Resources.of().descriptors - before
    assert not [each for each in more if "memfd" in each]
    assert sum("socket" in each for each in more) <= 2 + 3, more  # and those of its listener
    assert sum("pidfd" in each for each in more) <= 2, more
    assert mappings() == 4
    gc.disable()
    try:
        for pipe in (*first, one, other):
            pipe.abort()
        until(lambda: not mappings())
    finally:
        gc.enable()


def test_small_messages_need_no_thread(local_pair: Any) -> None:
    one, other = local_pair()
    before = set(threading.enumerate())
    for number in range(1000):
        one.send_tensor(torch.tensor(number))
        assert other.recv_tensor().item() == number
    assert set(threading.enumerate()) <= before
