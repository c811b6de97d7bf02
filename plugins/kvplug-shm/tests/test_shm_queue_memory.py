"""The memory of the queue "shm": what it takes, what it gives back, and what it leaves alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shm_queue_ends as ends
from kvplug import CapacityError, TimeoutError
from kvplug_testing.waits import Call

queue = ends.queue

MIB = 1 << 20


def resident() -> int:
    """Bytes of shared memory that a queue of this process takes."""
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    return max(int(each) << 10 for each in re.findall(r"kvplug-queue(?:.*\n)+?Rss:\s+(\d+) kB", smaps))


def test_a_queue_that_keeps_up_takes_the_memory_of_a_few_messages(queue: Any) -> None:
    writer, (reader,) = queue(max_chunk_bytes=4 * MIB, max_chunks=10)
    for number in range(60):
        writer.enqueue(torch.full((MIB // 2,), number, dtype=torch.float16))
        assert reader.dequeue()[-1] == number
    assert resident() < 4 * MIB


def test_what_large_messages_took_goes_back_when_small_ones_follow(queue: Any) -> None:
    writer, (reader,) = queue(options={"keep_bytes": MIB})
    for follows in ("small", torch.ones(4 * MIB)):
        writer.enqueue(torch.ones(4 * MIB))
        assert resident() >= 16 * MIB
        assert reader.dequeue().sum() == 4 * MIB
        writer.enqueue(follows)
        assert len(reader.dequeue()) == len(follows)
        if follows == "small" and resident() >= 16 * MIB:
            pytest.skip("this kernel keeps memory that is given back")


def test_messages_that_are_too_large_are_refused_and_the_rest_passes(queue: Any) -> None:
    writer, (reader,) = queue(options={"max_message_bytes": MIB})
    for value in (torch.ones(MIB), bytes(MIB + 1)):
        with pytest.raises(CapacityError, match=f"max_message_bytes is {MIB}"):
            writer.enqueue(value)
    many = [torch.full((1024,), float(at)) for at in range(240)]
    for _ in range(3):
        writer.enqueue(many)
        assert all(map(torch.equal, many, reader.dequeue()))


def test_large_messages_wait_for_each_other(queue: Any) -> None:
    writer, readers = queue(2, options={"max_message_bytes": 4 * MIB})
    writer.enqueue(bytes(3 * MIB))
    with pytest.raises(TimeoutError, match=r"rank 0 .* 1 message behind.*rank 1 .* 1 message behind"):
        writer.enqueue(bytes(3 * MIB), timeout=0.1)
    writer.enqueue("small")
    assert len(readers[0].dequeue()) == 3 * MIB
    waits = Call(lambda: writer.enqueue(bytes(3 * MIB + 1)))
    assert len(readers[1].dequeue()) == 3 * MIB
    waits.result()
    for reader in readers:
        assert reader.dequeue() == "small"
        assert len(reader.dequeue()) == 3 * MIB + 1
