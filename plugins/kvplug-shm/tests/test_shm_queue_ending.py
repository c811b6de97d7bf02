"""Ends of the queue "shm" are closed and aborted at every moment, and keep no memory."""

from __future__ import annotations

import logging
import threading
from typing import Any, ClassVar

import pytest

import shm_queue_ends as ends
from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug_shm.queue.admission import Admission
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_testing.waits import Call, until

queue = ends.queue


def test_a_writer_that_is_closed_within_its_own_chunk_sends_nothing(queue: Any) -> None:
    writer, (reader,) = queue()
    with pytest.raises(ClosedError), writer.acquire_write(4) as view:
        writer.close()
        view[:] = b"late"
    with pytest.raises(PeerGoneError):
        reader.dequeue(timeout=5)


def test_a_reader_that_is_closed_within_a_chunk_keeps_what_it_looks_at(queue: Any) -> None:
    writer, (reader,) = queue()
    with writer.acquire_write(4) as view:
        view[:] = b"here"
    with reader.acquire_read() as view:
        reader.close()
        assert view == b"here"
    assert (writer.readers[0].gone, writer.readers[0].died) == ("has left", False)


def test_many_threads_may_end_it_at_once(queue: Any) -> None:
    for _ in range(20):
        writer, (reader,) = queue()
        waits = Call(reader.dequeue)
        ended = [Call(call) for end in (writer, reader) for call in (end.close, end.abort, end.close)]
        assert [each.outcome() for each in ended] == [None] * 6
        assert isinstance(waits.outcome(), ClosedError | PeerGoneError)


class SlowFar:
    """A network half whose readers take nothing."""

    data: ClassVar[dict[str, Any]] = {}

    def __init__(self, interrupted: bool = False) -> None:
        self.closing, self.aborted = threading.Event(), threading.Event()
        self._interrupted = interrupted

    def close(self, deadline: Any) -> None:
        self.closing.set()
        if self._interrupted:
            raise KeyboardInterrupt
        assert self.aborted.wait(4 * ends.PATIENCE_S)

    def abort(self) -> None:
        self.aborted.set()


def test_abort_ends_a_close_that_waits_for_readers_elsewhere(queue: Any) -> None:
    writer, (reader,) = queue()
    writer._network = network = SlowFar()
    closes = Call(lambda: writer.close(timeout=None))
    assert network.closing.wait(ends.PATIENCE_S)
    writer.abort()
    assert closes.outcome() is None
    with pytest.raises(PeerGoneError):
        reader.dequeue()


def test_abort_ends_a_close_that_waits_for_whoever_is_inside(queue: Any) -> None:
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
    assert mapped() == 2, "a thread is inside with this memory"
    go_on.set()
    assert isinstance(holds.outcome(), ClosedError)
    assert mapped() == 1


def test_a_close_that_is_interrupted_lets_go_of_everything(queue: Any) -> None:
    writer, (reader,) = queue()
    writer._network = network = SlowFar(interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert network.aborted.is_set() and mapped() == 1
    with pytest.raises(PeerGoneError):
        reader.dequeue()


def test_abort_ends_what_an_interrupted_abort_has_left(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, (reader,) = queue()
    until(lambda: writer._admission._joined)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("kvplug_shm.queue.admission.hang_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.abort()
    writer.abort()
    assert mapped() == 1
    with pytest.raises(PeerGoneError):
        reader.dequeue()


def test_a_call_that_comes_while_the_end_is_aborted_keeps_no_memory(queue: Any) -> None:
    _, (reader,) = queue()

    class Late:
        """Lets the end be aborted between the two looks of who enters."""

        def __init__(self, lock: Any) -> None:
            self._lock = lock
            self.release = lock.release
            self.come = False

        def acquire(self, **given: Any) -> bool:
            taken = self._lock.acquire(**given)
            if not self.come:
                self.come = True
                reader.abort()
            return taken

    reader._use_guard._lock = Late(reader._use_guard._lock)
    with pytest.raises(ClosedError):
        reader.dequeue()
    assert mapped() == 1


def test_a_handler_may_end_a_writer_that_is_looking_at_its_readers(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's, which runs within whatever its thread does."""
    writer, _ = queue()
    told = writer._reader_table._reader

    def ended(member: Any) -> Any:
        writer.abort()
        return told(member)

    monkeypatch.setattr(writer._reader_table, "_reader", ended)
    assert isinstance(Call(lambda: writer.readers).outcome(), ClosedError)


def test_while_a_reader_joins_the_writer_can_be_ended_by_whoever_looks_at_the_readers(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that looks holds the reader table, and a handler that strikes there wants the door."""
    joined, struck = ReaderTable.joined, []

    def free() -> bool:
        with doors[0]._lock:
            return True

    def meanwhile(reader_table: ReaderTable, rank: int) -> None:
        joined(reader_table, rank)
        struck.append(Call(free).outcome(5.0))

    doors: list[Admission] = []
    note = Admission._note

    def noted(door: Admission, *args: Any) -> None:
        doors.append(door)
        note(door, *args)

    monkeypatch.setattr(Admission, "_note", noted)
    monkeypatch.setattr(ReaderTable, "joined", meanwhile)
    queue()
    until(lambda: struck)
    assert struck == [True]


def test_who_hears_of_an_eviction_may_look_at_the_readers(queue: Any) -> None:
    writer, _ = queue(2)
    looked = []

    class Looks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            looked.append(Call(lambda: writer.readers).outcome())

    handler = Looks()
    logging.getLogger("kvplug_shm.queue.reader_table").addHandler(handler)
    try:
        writer._reader_table.evict(1, "silent for 10.0 s", died=True)
    finally:
        logging.getLogger("kvplug_shm.queue.reader_table").removeHandler(handler)
    assert looked[0][1].died


def mapped() -> int:
    """How many mappings of queues this process has."""
    with open("/proc/self/maps", encoding="utf-8") as f:
        return sum("kvplug-queue" in line for line in f)


def test_memory_goes_with_the_end_whatever_exceptions_still_hold(queue: Any) -> None:
    writer, (reader,) = queue()
    kept = []
    for call in (lambda: reader.dequeue(timeout=0.01), lambda: reader.acquire_read(timeout=0.01).__enter__()):
        with pytest.raises(TimeoutError) as raised:
            call()
        kept.append(raised)
    assert mapped() == 2
    reader.close()
    writer.close()
    assert mapped() == 0
    assert len(kept) == 2
