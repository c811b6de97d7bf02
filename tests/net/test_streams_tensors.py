"""CUDA streams are lent: each has one owner, and comes back when it has done what it was given."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from kvplug.net import streams

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, priority: int) -> None:
        self.device = GPU
        self.priority = priority
        self.done = True

    def query(self) -> bool:
        return self.done


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams that were made; none was before."""
    found: list[Stream] = []

    def make(_: Any, priority: int) -> Stream:
        found.append(Stream(priority))
        return found[-1]

    monkeypatch.setattr(streams, "_idle", defaultdict(list))
    monkeypatch.setattr(streams, "_made", make)
    return found


def test_a_stream_has_one_owner_at_a_time(made: list[Stream]) -> None:
    lent = [streams.StreamPool.acquire(GPU) for _ in range(40)]
    assert len({id(each) for each in lent}) == 40
    streams.StreamPool.release(lent[7])
    assert streams.StreamPool.acquire(GPU) is lent[7]
    assert len(made) == 40


def test_a_stream_that_has_work_is_not_lent(made: list[Stream]) -> None:
    busy, idle = streams.StreamPool.acquire(GPU), streams.StreamPool.acquire(GPU)
    busy.done = False
    for each in (busy, idle):
        streams.StreamPool.release(each)
    assert streams.StreamPool.acquire(GPU) is idle
    assert streams.StreamPool.acquire(GPU) is made[2]
    busy.done = True
    assert streams.StreamPool.acquire(GPU) is busy


def test_urgent_streams_are_apart_from_others_which_have_the_lowest_priority(made: list[Stream]) -> None:
    urgent, other = streams.StreamPool.acquire(GPU), streams.StreamPool.acquire(GPU, is_urgent=False)
    assert urgent.priority < other.priority == 0, "a lower number is a higher priority"
    streams.StreamPool.release(urgent)
    streams.StreamPool.release(other, is_urgent=False)
    assert streams.StreamPool.acquire(GPU, is_urgent=False) is other
    assert streams.StreamPool.acquire(GPU) is urgent
