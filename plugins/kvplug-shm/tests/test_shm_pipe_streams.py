"""Messages through rings of all sizes: every place where one may begin, wrap, be cut or be resumed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import shm_pipe_ends as ends
from kvplug.engine import KVLayout
from kvplug_shm.pipe.geometry import LINE, lines
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.waits import Call

local_pair, by_hand = ends.local_pair, ends.by_hand

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


@settings(max_examples=3 * settings.default.max_examples // 5)
@given(
    layouts=st.tuples(*[st.sampled_from(["BKTHD", "KBTHD", "BHTKD", "BTHKD", "TBHKD", "DBTHK"])] * 2),
    sizes=st.fixed_dictionaries({"T": st.integers(1, 5), "H": st.integers(1, 4), "D": st.integers(1, 270)}),
    taken=st.lists(st.integers(0, 8), max_size=7, unique=True),
    shift=st.integers(0, 20),
    ring=st.sampled_from([ends.TINY, {"slots": 3, "slot_bytes": 4096}]),
)
def test_blocks_of_any_layout_go_through_any_ring(
    layouts: tuple[str, str], sizes: dict[str, int], taken: list[int], shift: int, ring: dict[str, int]
) -> None:
    def cache(axes: str, salt: int) -> Any:
        layout = KVLayout(axes, {"B": 9, **sizes})
        flat = [bytes_of(math.prod(layout.shape), salt + layer) for layer in range(3)]
        return layout.page_views([each.view(layout.shape) for each in flat])

    source, target, before = cache(layouts[0], 0), cache(layouts[1], 10), cache(layouts[1], 10)
    sent, others = taken[::-1], [each for each in range(9) if each not in taken]
    end = ends.endpoint(**ring)
    with end.listen() as listener, end.connect(listener.contact) as one, listener.accept() as other:
        exchange(one, other, [None] * shift)  # where in the ring it begins
        sending = Call(lambda: one.send_blocks(source, sent))
        other.recv_blocks(target, taken)
        sending.result().wait(ends.PATIENCE_S)
    for layers in zip(source, target, before, strict=True):
        for wanted, got, old in zip(*layers, strict=True):
            assert_same(wanted[sent], got[taken])
            assert_same(old[others], got[others])


# -- memory ----------------------------------------------------------------------------------------


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
