"""Readers join the queue "shm": its handle, its ring, and readers that leave again."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest

import shm_queue_ends as ends
from kvplug import (
    CapacityError,
    ConfigError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
)
from kvplug.transport import PeerIdentity
from kvplug_shm.queue import join
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_testing.contract.forked_child import held, in_forked_child
from kvplug_testing.waits import Call, until

queue, child, sound_sleep = ends.queue, ends.child, ends.sound_sleep

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
    welcome = join.welcome

    def forks_before(*args: Any) -> None:
        found.append(in_forked_child(held))
        welcome(*args)

    monkeypatch.setattr(join, "welcome", forks_before)
    with ends.endpoint().create_from_handle(writer.export_handle(), 1):
        assert "/memfd:kvplug-queue" in held()
    assert len(found) == 1
    assert "/memfd:kvplug-queue" not in found[0]


def num_joining() -> int:
    """Threads in which a writer admits a reader."""
    return sum(each.name == "kvplug-shm-queue-join" for each in threading.enumerate())


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
        patch.setattr("kvplug_shm.queue.join.watched", refused)
        with pytest.raises(ResourceExhaustedError, match="no free descriptor"):
            end.create_from_handle(handle, 1)
    with end.create_from_handle(handle, 1) as reader:
        goes_on(writer, reader)


def test_a_reader_that_was_welcomed_and_cannot_be_watched_is_evicted(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It believes that it has joined: no other reader may take its place or receive an end notice.

    That is so where there are heartbeats, which begin afterwards.
    """
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    writer, (reader,) = queue(2, attached=1)
    until(lambda: not num_joining())  # this one is watched

    def refused(*_: Any) -> Any:
        raise CapacityError("no descriptors are left")

    monkeypatch.setattr("kvplug_shm.queue.admission.join.watched", refused)
    end, handle = ends.endpoint(), writer.export_handle()
    with end.create_from_handle(handle, 1) as unseen:
        until(lambda: writer.readers[1].gone)
        assert writer.readers[1].died and "no descriptors are left" in writer.readers[1].gone
        with pytest.raises(ConfigError, match="attached to this queue already"):
            end.create_from_handle(handle, 1)
        goes_on(writer, reader)
        with pytest.raises(TransportError, match="evicted this reader"):
            unseen.dequeue()


@pytest.mark.usefixtures("sound_sleep")
def test_a_living_writer_that_hangs_up_on_one_reader_is_there_for_the_others(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, watches = join.watched, []

    def noted(connection: Any, *args: Any) -> Any:
        watch = watched(connection, *args)
        if threading.current_thread() is not threading.main_thread():
            watches.append((connection, watch))  # the writer's
        return watch

    monkeypatch.setattr(join, "watched", noted)
    writer, readers = queue(2)
    waits = Call(readers[1].dequeue)
    assert waits.is_blocked(0.3)
    connection, watch = watches[1]
    watch.close()
    join.hang_up(connection)
    waits.raised(PeerGoneError)
    goes_on(writer, readers[0])


# -- other processes -----------------------------------------------------------------------------------
