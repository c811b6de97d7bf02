"""Ends of the queue "shm" are closed and aborted at every moment, and keep no memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import shm_queue_ends as ends
from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.net.wire import decode
from kvplug.transport import MessageQueue, WireError
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_testing.waits import Call, until

queue = ends.queue


def test_an_end_may_be_closed_within_its_own_chunk(queue: Any) -> None:
    """What the writer has not published is not sent, and a reader's view stays valid."""
    writer, (reader,) = queue()
    with writer.acquire_write(4) as view:
        view[:] = b"here"
    with reader.acquire_read() as view:
        reader.close()
        assert view == b"here"
    assert (writer.readers[0].gone, writer.readers[0].died) == ("has left", False)
    writer, (reader,) = queue()
    with pytest.raises(ClosedError), writer.acquire_write(4) as view:
        writer.close()
        view[:] = b"late"
    with pytest.raises(PeerGoneError):
        reader.dequeue(timeout=5)


def test_abort_ends_a_close_that_waits_for_a_thread_inside(queue: Any) -> None:
    writer, (reader,) = queue()
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with writer.acquire_write(4):
            inside.set()
            assert go_on.wait(4 * ends.PATIENCE_S)

    holds = Call(hold)
    assert inside.wait(ends.PATIENCE_S)
    closes = Call(lambda: writer.close(timeout=None))
    until(lambda: writer.closed)
    writer.abort()
    assert closes.outcome() is None
    with pytest.raises(PeerGoneError):
        reader.dequeue()
    assert ends.num_mapped() == 2, "a thread is inside with this memory"
    go_on.set()
    assert isinstance(holds.outcome(), ClosedError)
    assert ends.num_mapped() == 1


def test_a_signal_handler_may_end_a_writer_whose_thread_reads_the_state_of_its_readers(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = queue(2)
    made = MessageQueue.ReaderState

    def ended(**given: Any) -> Any:
        writer.abort()
        return made(**given)

    monkeypatch.setattr(MessageQueue, "ReaderState", ended)
    assert isinstance(Call(lambda: writer.readers).outcome(), ClosedError)


def test_the_thread_that_records_a_join_may_end_the_writer(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler may that interrupts this thread while it holds the lock of the reader table."""
    joined, errors = ReaderTable.joined, []

    def meanwhile(table: ReaderTable, rank: int) -> None:
        joined(table, rank)
        errors.append(Call(writer.abort).end(5.0).error)

    monkeypatch.setattr(ReaderTable, "joined", meanwhile)
    writer, _ = queue(1, attached=0)
    with ends.endpoint().create_from_handle(writer.export_handle(), 0):
        until(lambda: errors)
    assert errors == [None]


def test_closing_both_ends_unmaps_the_memory_though_exceptions_are_kept(queue: Any) -> None:
    writer, (reader,) = queue()
    kept = []
    for call in (lambda: reader.dequeue(timeout=0.01), lambda: reader.acquire_read(timeout=0.01).__enter__()):
        with pytest.raises(TimeoutError) as raised:
            call()
        kept.append(raised)
    assert ends.num_mapped() == 2
    reader.close()
    writer.close()
    assert ends.num_mapped() == 0
    assert len(kept) == 2


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_memory_is_unmapped_after_a_reader_was_aborted_while_it_decoded_a_value(
    queue: Any, monkeypatch: pytest.MonkeyPatch, is_spoilt: bool
) -> None:
    writer, (reader,) = queue()

    def decode_late(head: memoryview, **given: Any) -> Any:
        part = head[:1]
        reader.abort()
        if is_spoilt:
            raise WireError(f"the writer has used the memory again: {bytes(part)!r}")
        return decode(head, **given)

    monkeypatch.setattr("kvplug_shm.queue.reader.decode", decode_late)
    writer.enqueue("a value")
    with pytest.raises(ClosedError) as raised:
        reader.dequeue()
    writer.close()
    assert ends.num_mapped() == 0
    assert raised.value
