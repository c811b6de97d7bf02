"""Blocks of a paged cache through rings of all sizes: rows that are cut, resumed, and left to the writer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import shm_pipe_ends as ends
from kvplug import TimeoutError
from kvplug.engine import KVLayout, page_views
from kvplug_testing.comparison import assert_same
from kvplug_testing.waits import Call

local_pair, by_hand = ends.local_pair, ends.by_hand

LAYOUTS = ("BKTHD", "KBTHD", "BHTKD", "BTHKD", "TBHKD", "DBTHK")


def cache_of(num_blocks: int, row: tuple[int, ...], dtype: torch.dtype, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    nbytes = num_blocks * 2 * torch.Size(row).numel() * dtype.itemsize
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(num_blocks, 2, *row)


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)


def message(cache: Any, block_ids: list[int]) -> Any:
    return torch.stack([cache[block_ids, 0], cache[block_ids, 1]])


def views(cache: Any) -> list[Any]:
    return [cache[:, 0], cache[:, 1]]


@settings(max_examples=3 * settings.default.max_examples // 5)
@given(
    there=st.sampled_from(LAYOUTS),
    here=st.sampled_from(LAYOUTS),
    sizes=st.fixed_dictionaries({"T": st.integers(1, 5), "H": st.integers(1, 4), "D": st.integers(1, 70)}),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.complex64]),
    count=st.integers(0, 7),
    shift=st.integers(0, 20),
    tiny=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_blocks_of_any_layout_go_through_any_ring(
    there: str,
    here: str,
    sizes: dict[str, int],
    dtype: torch.dtype,
    count: int,
    shift: int,
    tiny: bool,
    seed: int,
) -> None:
    def caches(axes: str, num_blocks: int, salt: int) -> list[Any]:
        layout = KVLayout(axes, {"B": num_blocks, **sizes})
        layers = [cache_of(1, layout.shape, dtype, salt + layer)[0, 0] for layer in range(3)]
        return page_views(layers, layout)

    shuffled = random.Random(seed)
    sent, taken = shuffled.sample(range(7), count), shuffled.sample(range(9), count)
    source, target, before = caches(there, 7, seed), caches(here, 9, seed + 10), caches(here, 9, seed + 10)
    reported: list[int] = []
    end = ends.endpoint(**(ends.TINY if tiny else {"slots": 3, "slot_bytes": 4096}))
    with end.listen() as listener, end.connect(listener.contact) as one, listener.accept() as other:
        for _ in range(shift):  # where in the ring it begins
            one.send_tensor(None)
            assert other.recv_tensor() is None
        sending = Call(lambda: one.send_blocks(source, sent))
        other.recv_blocks(target, taken, on_layer=reported.append)
        sending.result().wait(ends.PATIENCE_S)
    assert reported == [0, 1, 2]
    others = [each for each in range(9) if each not in taken]
    for layer in range(3):
        for old, got, wanted in zip(before[layer], target[layer], source[layer], strict=True):
            assert_same(bits(wanted[sent]), bits(got[taken]))
            assert_same(bits(old[others]), bits(got[others]))


@pytest.mark.parametrize("how", ["blocks", "other blocks", "a tensor", "out"])
def test_blocks_that_are_late_are_resumed_by_whatever_comes_next(by_hand: Any, how: str) -> None:
    peer, other = by_hand(**ends.TINY)
    source = cache_of(12, (3, 35), torch.float16, 1)  # rows of 210 bytes: no multiple of a line
    sent = message(source, [7, 2, 11, 0, 5, 9])
    content = ends.content_of(sent)
    peer.lay(ends.prefix_of(sent) + content[:704])
    first, second = cache_of(12, (3, 35), torch.float16, 2), cache_of(12, (3, 35), torch.float16, 3)
    with pytest.raises(TimeoutError, match=r"[1-9]\d* of 2520 bytes"):
        other.recv_blocks(views(first), [0, 1, 2, 3, 4, 5], timeout=0.05)
    sending = Call(lambda: peer.lay_all(content[704:]))
    target, here = (second, [6, 5, 4, 3, 2, 1]) if how == "other blocks" else (first, [0, 1, 2, 3, 4, 5])
    if how == "a tensor":
        got = other.recv_tensor()
    elif how == "out":
        got = other.recv_tensor(torch.empty(2, 6, 3, 35, dtype=torch.float16))
    else:
        other.recv_blocks(views(target), here)
        got = message(target, here)
    assert_same(bits(sent), bits(got))
    sending.result()
