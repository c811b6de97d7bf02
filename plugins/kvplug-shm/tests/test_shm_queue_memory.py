"""The memory of the queue "shm": what it takes, what it gives back, and what it leaves alone."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import shm_queue_ends as ends
from kvplug import CapacityError, TimeoutError
from kvplug_testing.waits import Call

queue, remote_reader = ends.queue, ends.remote_reader

MIB = 1 << 20

# -- memory ------------------------------------------------------------------------------------------


def resident(writer: Any) -> int:
    """Bytes of shared memory that the queue takes."""
    with open("/proc/self/smaps", encoding="utf-8") as f:
        inside, found = False, 0
        for line in f:
            if "-" in line.split(" ", 1)[0]:
                inside = "kvplug-queue" in line
            elif inside and line.startswith("Rss:"):
                found = max(found, int(line.split()[1]) * 1024)
    return found


def test_a_queue_that_keeps_up_takes_the_memory_of_a_few_messages(queue: Any) -> None:
    writer, (reader,) = queue(max_chunk_bytes=4 * MIB, max_chunks=10)
    for number in range(60):
        writer.enqueue(torch.full((MIB // 2,), number, dtype=torch.float16))
        assert reader.dequeue()[-1] == number
    assert resident(writer) < 4 * MIB


def test_what_large_messages_took_goes_back_when_small_ones_follow(queue: Any) -> None:
    writer, (reader,) = queue(options={"keep_bytes": MIB})
    writer.enqueue(torch.ones(4 * MIB))
    assert resident(writer) >= 16 * MIB
    assert reader.dequeue().sum() == 4 * MIB
    writer.enqueue("small")
    assert reader.dequeue() == "small"
    if resident(writer) >= 16 * MIB:
        pytest.skip("this kernel keeps memory that is given back")
    writer.enqueue(torch.ones(4 * MIB))
    assert reader.dequeue().sum() == 4 * MIB


def test_received_tensors_use_memory_again_and_are_nobody_elses(queue: Any) -> None:
    writer, (reader,) = queue(max_chunk_bytes=4 * MIB)
    kept = []
    for number in range(10):
        writer.enqueue(torch.full((MIB,), number, dtype=torch.uint8))
        kept.append(reader.dequeue())
    assert [int(each.sum()) for each in kept] == [number * MIB for number in range(10)]
    addresses = {each.data_ptr() for each in kept}
    kept.clear()
    writer.enqueue(torch.ones(MIB, dtype=torch.uint8))
    assert reader.dequeue().data_ptr() in addresses


def test_messages_that_are_too_large_are_refused_and_the_rest_passes(queue: Any) -> None:
    writer, (reader,) = queue(options={"max_message_bytes": MIB})
    for value in (torch.ones(MIB), bytes(MIB + 1)):
        with pytest.raises(CapacityError, match=f"at most {MIB} are sent.*max_message_bytes"):
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
    assert waits.outcome() is None
    for reader in readers:
        assert reader.dequeue() == "small"
        assert len(reader.dequeue()) == 3 * MIB + 1


def test_a_reader_that_comes_late_gets_large_messages_too(queue: Any, remote_reader: Any) -> None:
    writer, (local_one,) = queue(2, attached=1)
    sent = [torch.randn(MIB), "between", torch.randn(MIB)]
    for value in sent:
        writer.enqueue(value)
    with ends.endpoint().create_from_handle(writer.export_handle(), 1) as late:
        for reader in (local_one, late):
            one, between, other = (reader.dequeue() for _ in sent)
            assert torch.equal(one, sent[0]) and between == "between" and torch.equal(other, sent[2])


# -- other processes -----------------------------------------------------------------------------------


def test_a_chunk_that_another_process_looks_at_stays_as_it_is(queue: Any, remote_reader: Any) -> None:
    writer, (local_one,) = queue(2, attached=1)
    child = remote_reader(writer, 1, "look_slowly")
    with writer.acquire_write(5) as view:
        view[:] = b"first"
    assert child.recv() == b"first"
    for number in range(ends.CHUNKS - 1):
        writer.enqueue(number)
    with local_one.acquire_read() as view:
        assert view == b"first"
    for number in range(ends.CHUNKS - 1):
        assert local_one.dequeue() == number
    with pytest.raises(TimeoutError, match=rf"rank 1 \(pid {child.pid}\), {ends.CHUNKS} messages behind"):
        writer.enqueue("no room", timeout=0.2)
    child.send("go on")
    assert child.recv() == "looked"


def test_nothing_of_it_is_in_dev_shm(queue: Any) -> None:
    """A container limits it to 64 MB, and what is there outlives a process that is killed."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    writer, (reader,) = queue()
    writer.enqueue(bytes(100 * MIB))
    assert len(reader.dequeue()) == 100 * MIB
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) - before == set()
