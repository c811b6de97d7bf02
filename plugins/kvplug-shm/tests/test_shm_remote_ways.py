"""Readers of the queue "shm" that share no memory with the writer: slow, stopped, dead or cut off."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

import shm_queue_ends as ends
import shm_remote_ends as remote
from kvplug import PeerGoneError
from kvplug.transport import PeerIdentity
from kvplug_shm.queue import remote_readers
from kvplug_testing.waits import Call, until

queue, child = ends.queue, ends.child
NETWORK = remote.NETWORK


def test_a_stopped_reader_is_not_waited_for_beyond_the_callers_deadline(
    queue: Any, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_readers, "ARRIVAL_S", 1000.0)
    writer, _ = queue(attached=0, **NETWORK)
    reader = child("sit", writer.export_handle(), **NETWORK)
    reader.stop()
    Call(lambda: writer.enqueue("late", timeout=0.1)).end()
    assert not writer.readers[0].gone
    reader.kill()


def test_a_stopped_reader_holds_up_one_message_briefly_and_gets_all_when_it_continues(
    queue: Any, child: Any
) -> None:
    """Not even a message that is larger than the connection's buffers is waited for twice."""
    writer, _ = queue(attached=0, **NETWORK)
    reader = child("read_until_the_end", writer.export_handle(), **NETWORK)
    reader.stop()
    values = ["one", b"x" * (32 << 20), "three"]
    began = time.monotonic()
    for value in values:
        writer.enqueue(value)
    assert time.monotonic() - began < 5 * remote_readers.ARRIVAL_S
    reader.cont()
    reader.send("read")
    until(lambda: writer.readers[0].lag == 0)
    writer.close()
    assert reader.result()[:3] == ["one", 32 << 20, "three"]


def test_a_silent_reader_without_a_pidfd_is_evicted_and_its_error_counts_the_lost_messages(
    queue: Any, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The more impatient of the two ends decides how often both send something."""
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    writer, _ = queue(attached=0, heartbeat_timeout_s=1.0, **NETWORK)
    reader = child("read_until_the_end", writer.export_handle(), heartbeat_timeout_s=60.0, **NETWORK)
    time.sleep(2.0)
    assert not writer.readers[0].gone, "heartbeats did not keep it alive"
    writer.enqueue("arrived")
    reader.stop()
    until(lambda: writer.readers[0].gone)
    assert writer.readers[0].gone.startswith("silent for") and writer.readers[0].died
    reader.cont()
    reader.send("read")
    first, end = reader.result()
    assert first == "arrived"
    assert end.startswith("TransportError") and "has evicted this reader (silent for" in end
    assert "0 of 1 messages are lost to reader rank 0, and all that come later" in end


def test_a_broken_connection_is_not_restored(queue: Any) -> None:
    writer, _ = queue(attached=0, **NETWORK)
    with contextlib.closing(remote.Wire(writer.export_handle())) as wire:
        reader = ends.endpoint(**NETWORK).create_from_handle(wire.handle, 0)
        writer.enqueue("before")
        wire.close()
        assert reader.dequeue() == "before"
        with pytest.raises(PeerGoneError, match=r"its connection ended\) after 1 messages"):
            reader.dequeue()
        until(lambda: writer.readers[0].gone)
        assert (writer.readers[0].gone, writer.readers[0].died) == ("its connection ended", True)
        reader.abort()
