"""Ends of the queue "shm" that sleep are woken by whatever they wait for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import shm_queue_ends as ends
from kvplug import ClosedError, PeerGoneError
from kvplug.transport import BusyError
from kvplug_shm.ring.ends import WritingEnd
from kvplug_testing.waits import Call

queue = ends.queue

sound_sleep = ends.sound_sleep


@pytest.mark.usefixtures("sound_sleep")
@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("verb", ["dequeue", "wait_until_ready"])
def test_a_reader_that_sleeps_is_woken_when_it_ends(queue: Any, verb: str, end: str) -> None:
    _, (reader,) = queue()
    waits = Call(getattr(reader, verb))
    time.sleep(0.3)
    getattr(reader, end)()
    assert isinstance(waits.outcome(), ClosedError)


@pytest.mark.usefixtures("sound_sleep")
@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("verb", ["enqueue", "wait_until_ready"])
def test_a_writer_that_sleeps_is_woken_when_it_ends(queue: Any, verb: str, end: str) -> None:
    writer, _ = queue()
    for number in range(ends.CHUNKS):
        writer.enqueue(number)
    calls = {"enqueue": lambda: writer.enqueue("more"), "wait_until_ready": writer.wait_until_ready}
    waits = Call(calls[verb])
    time.sleep(0.3)
    getattr(writer, end)()
    assert isinstance(waits.outcome(), ClosedError)


@pytest.mark.usefixtures("sound_sleep")
def test_a_reader_that_sleeps_is_woken_by_a_message_and_by_the_writers_end(queue: Any) -> None:
    writer, readers = queue(2)
    waits = [Call(reader.dequeue) for reader in readers]
    time.sleep(0.3)
    writer.enqueue("wake up")
    assert [each.outcome() for each in waits] == ["wake up"] * 2
    waits = [Call(reader.dequeue) for reader in readers]
    time.sleep(0.3)
    writer.close()
    assert all(isinstance(each.outcome(), PeerGoneError) for each in waits)


def test_a_writer_of_large_messages_waits_once_for_a_reader_that_does_not_go_on(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, (reader,) = queue(max_chunk_bytes=10 << 20, max_chunks=5)
    park, parked = WritingEnd.park, []
    monkeypatch.setattr(WritingEnd, "park", lambda *given: (parked.append(given), park(*given)))
    large = torch.zeros(9 << 20, dtype=torch.uint8)
    for _ in range(5):
        writer.enqueue(large)
    assert len(parked) == 1
    assert reader.dequeue().shape == large.shape
    writer.enqueue(large)
    assert len(parked) == 2


def test_a_large_message_that_has_no_time_does_not_wait_for_readers(queue: Any) -> None:
    writer, (reader,) = queue(max_chunk_bytes=10 << 20, max_chunks=5)
    for number in range(5):
        writer.enqueue(torch.full((9 << 20,), number, dtype=torch.uint8), 0)
    assert [int(reader.dequeue()[-1]) for _ in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("sound_sleep")
def test_a_writer_that_sleeps_is_woken_by_room_and_by_a_death(queue: Any) -> None:
    writer, readers = queue(2)
    for number in range(ends.CHUNKS):
        writer.enqueue(number)
        readers[0].dequeue()
    waits = Call(lambda: writer.enqueue("room"))
    time.sleep(0.3)
    readers[1].dequeue()
    assert waits.outcome() is None
    waits = Call(lambda: writer.enqueue("more"))
    time.sleep(0.3)
    readers[1].abort()
    assert waits.outcome() is None


@pytest.mark.usefixtures("sound_sleep")
def test_who_waits_to_be_ready_is_woken_by_the_last_who_is(queue: Any) -> None:
    writer, readers = queue(2)
    waits = [Call(end.wait_until_ready) for end in (writer, readers[0])]
    time.sleep(0.3)
    readers[1].wait_until_ready()
    assert [each.outcome() for each in waits] == [None, None]


def test_one_thread_at_a_time(queue: Any) -> None:
    writer, (reader,) = queue()
    waits = Call(reader.dequeue)
    assert waits.is_blocked()
    for call in (reader.dequeue, reader.wait_until_ready, lambda: reader.acquire_read().__enter__()):
        with pytest.raises(BusyError):
            call()
    writer.enqueue("first")
    assert waits.outcome() == "first"
