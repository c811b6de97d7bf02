"""Ends of the queue "shm" that sleep are woken by whatever they wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shm_queue_ends as ends
from kvplug import ClosedError, PeerGoneError
from kvplug_testing.waits import Call

queue, sound_sleep = ends.queue, ends.sound_sleep


def asleep(call: Callable[[], Any]) -> Call:
    """The call, when it has been blocked for long."""
    waits = Call(call)
    assert waits.is_blocked(0.2)
    return waits


@pytest.mark.usefixtures("sound_sleep")
@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("who", ["reader", "writer"])
@pytest.mark.parametrize("ready", [False, True])
def test_an_end_that_sleeps_is_woken_when_it_ends(queue: Any, who: str, ready: bool, end: str) -> None:
    writer, (reader,) = queue()
    sleeper, verb = (reader, reader.dequeue) if who == "reader" else (writer, lambda: writer.enqueue("more"))
    if who == "writer":
        for number in range(ends.CHUNKS):
            writer.enqueue(number)
    waits = asleep(sleeper.wait_until_ready if ready else verb)
    getattr(sleeper, end)()
    waits.raised(ClosedError)


@pytest.mark.usefixtures("sound_sleep")
def test_a_reader_that_sleeps_is_woken_by_a_message_and_by_the_writers_end(queue: Any) -> None:
    writer, readers = queue(2)
    waits = [asleep(reader.dequeue) for reader in readers]
    writer.enqueue("wake up")
    assert [each.result() for each in waits] == ["wake up"] * 2
    waits = [asleep(reader.dequeue) for reader in readers]
    writer.close()
    for each in waits:
        each.raised(PeerGoneError)


@pytest.mark.usefixtures("sound_sleep")
def test_a_writer_that_sleeps_is_woken_by_room_and_by_a_death(queue: Any) -> None:
    writer, readers = queue(2)
    for number in range(ends.CHUNKS):
        writer.enqueue(number)
        readers[0].dequeue()
    waits = asleep(lambda: writer.enqueue("room"))
    readers[1].dequeue()
    waits.result()
    waits = asleep(lambda: writer.enqueue("more"))
    readers[1].abort()
    waits.result()
