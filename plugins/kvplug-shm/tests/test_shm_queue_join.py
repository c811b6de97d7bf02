"""Readers join the queue "shm": its handle, its ring, and readers that leave again."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest

import shm_queue_ends as ends
from kvplug import (
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
)
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_shm.queue.ring_buffer import ShmRingBuffer
from kvplug_testing.contract.forked_child import held, in_forked_child
from kvplug_testing.waits import Call, until

queue = ends.queue

# -- joining -----------------------------------------------------------------------------------------


def test_a_handle_is_open_until_the_last_reader_has_come(queue: Any) -> None:
    until(lambda: ends.num_memories() == 0)  # of queues before, whose readers may just have been joining
    writer, _ = queue(2, attached=1)
    until(lambda: ends.num_memories() == 1)  # the copy for the reader that has joined is closed later
    with ends.endpoint().create_from_handle(writer.export_handle(), 1):
        until(lambda: ends.num_memories() == 0)


@pytest.mark.parametrize("fails", [False, True])
def test_the_ring_is_handed_out_until_all_have_joined(
    queue: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """One that was admitted has nothing yet."""
    writer, _ = queue(2, attached=0)
    admitted, other_has_joined = threading.Event(), threading.Event()
    index_of = ReaderTable.index_of

    def slowly(table: ReaderTable, rank: int) -> Any:
        if rank == 1 and not other_has_joined.is_set():
            admitted.set()
            assert other_has_joined.wait(ends.PATIENCE_S)
            if fails:
                raise TransportError("not this time")
        return index_of(table, rank)

    monkeypatch.setattr(ReaderTable, "index_of", slowly)
    end, handle = ends.endpoint(), writer.export_handle()
    joins = Call(lambda: end.create_from_handle(handle, 1))
    assert admitted.wait(ends.PATIENCE_S)
    with end.create_from_handle(handle, 0):
        until(lambda: num_joining() == 1)
        other_has_joined.set()
        reader = joins.outcome()
        if fails:
            assert isinstance(reader, PeerGoneError)
            reader = end.create_from_handle(handle, 1)
        with reader:
            writer.enqueue("both")
            assert reader.dequeue() == "both"


def test_a_child_that_is_forked_while_a_reader_joins_does_not_hold_the_ring(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: "kvplug-queue" not in held())  # of queues before
    writer, _ = queue(2, attached=0)
    found: list[str] = []
    send = JoiningPeer.send

    def forks_before(peer: JoiningPeer, value: object, *args: Any) -> None:
        if value == "welcome":
            found.append(in_forked_child(held))
        send(peer, value, *args)

    monkeypatch.setattr(JoiningPeer, "send", forks_before)
    with ends.endpoint().create_from_handle(writer.export_handle(), 1):
        assert "/memfd:kvplug-queue" in held()
    assert len(found) == 1
    assert "/memfd:kvplug-queue" not in found[0]


def num_joining() -> int:
    """Threads in which a writer admits a reader."""
    return sum(each.name == "kvplug-shm-queue-serve" for each in threading.enumerate())


def goes_on(writer: Any, reader: Any) -> None:
    """This reader still gets messages."""
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.1)
    writer.enqueue("on")
    assert reader.dequeue() == "on"


def test_a_reader_that_cannot_be_watched_is_not_admitted_and_may_try_again(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = queue(2, attached=1)
    until(lambda: not num_joining())
    end, handle = ends.endpoint(), writer.export_handle()

    def refused(*_: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(JoiningPeer, "watch", refused)
        with pytest.raises(ResourceExhaustedError, match="no free descriptor"):
            end.create_from_handle(handle, 1)
    with end.create_from_handle(handle, 1) as reader:
        goes_on(writer, reader)


def test_a_reader_that_gave_up_its_join_may_try_again_before_the_writer_has_noticed(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = queue(1, attached=0)
    end, handle = ends.endpoint(), writer.export_handle()
    dismiss = ReaderTable.dismiss

    def late(table: ReaderTable, rank: int) -> None:
        time.sleep(0.3)
        dismiss(table, rank)

    def refused(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(ReaderTable, "dismiss", late)
    with monkeypatch.context() as patch:
        patch.setattr(ShmRingBuffer, "attach", refused)
        with pytest.raises(ResourceExhaustedError, match="memory"):
            end.create_from_handle(handle, 0)
    with end.create_from_handle(handle, 0) as reader:
        goes_on(writer, reader)
