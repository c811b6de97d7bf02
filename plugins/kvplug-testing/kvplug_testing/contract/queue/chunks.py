"""Chunks (law QUEUE-5): written and read in place, always released, and limited in number and size."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug import CapacityError, TimeoutError, UnsupportedError
from kvplug.transport import MessageQueue
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import CHUNK, CHUNKS, QueueSuite, fill, received, sent, wrong
from kvplug_testing.waits import Call, raises


class FaultOfTheBlockError(Exception):
    """The error that a test raises inside a block."""


def write(writer: MessageQueue, data: bytes, fault: bool = False) -> None:
    """Send one chunk, which must become free in time."""

    def block() -> None:
        with writer.acquire_write(len(data), timeout=waits.patience_s) as view:
            view[:] = data
            if fault:
                raise FaultOfTheBlockError

    Call(block).result(waits.patience_s + 1)


def read(reader: MessageQueue, fault: bool = False) -> bytes:
    """A copy of the next chunk, which must arrive in time."""

    def block() -> bytes:
        with reader.acquire_read(timeout=waits.patience_s) as view:
            if fault:
                raise FaultOfTheBlockError
            return bytes(view)

    return Call(block).result(waits.patience_s + 1)  # type: ignore[no-any-return]


class Chunks(QueueSuite):
    """Raw bytes in place, and free chunks."""

    @law("QUEUE-5")
    def test_a_chunk_is_read_as_it_was_written(self) -> None:
        writer, readers = self.queue(2)
        for data in (b"", b"x", bytes(range(256)) * 16, b"y" * CHUNK):
            write(writer, data)
            for reader in readers:
                assert_same(data, read(reader), f"a chunk of {len(data)} bytes")

    @law("QUEUE-5")
    def test_a_chunk_is_as_large_as_the_context_says(self) -> None:
        writer, (reader,) = self.queue()

        def whole() -> int:
            with writer.acquire_write() as view:
                view[:] = b"w" * len(view)
                return len(view)

        assert Call(whole).result() == CHUNK
        assert_same(b"w" * CHUNK, read(reader))

        def too_large() -> None:
            with writer.acquire_write(CHUNK + 1):
                pass

        raises(CapacityError, too_large)

    @law("QUEUE-5")
    def test_a_reader_may_not_write_into_a_chunk(self) -> None:
        writer, readers = self.queue(2)
        write(writer, b"original")

        def fails() -> None:
            with readers[0].acquire_read(timeout=waits.patience_s) as view:
                view[:] = b"spoiled!"

        raises(TypeError, fails)
        assert read(readers[1]) == b"original"

    @law("QUEUE-5")
    def test_a_view_is_not_valid_after_its_block(self) -> None:
        writer, (reader,) = self.queue()
        kept: list[Any] = []
        with writer.acquire_write(4, timeout=waits.patience_s) as view:
            view[:] = b"abcd"
            kept.append(view)
        with reader.acquire_read(timeout=waits.patience_s) as view:
            kept.append(view)
        for view, which in zip(kept, ("writer", "reader"), strict=True):
            with pytest.raises(ValueError, match="released"):
                view[0]
                pytest.fail(f"the {which}'s view still shows memory that belongs to the next message")

    @law("QUEUE-5")
    def test_what_a_block_of_the_writer_leaves_by_an_exception_was_never_sent(self) -> None:
        writer, (reader,) = self.queue()
        for _ in range(3 * CHUNKS):
            raises(FaultOfTheBlockError, lambda: write(writer, b"half a mess", fault=True))
        sent(writer, "after")
        assert received(reader) == "after"

    @law("QUEUE-5")
    def test_a_chunk_comes_back_from_a_reader_whose_block_raises(self) -> None:
        writer, readers = self.queue(2)
        for number in range(3 * CHUNKS):
            write(writer, bytes([number]))
            raises(FaultOfTheBlockError, lambda: read(readers[0], fault=True))
            assert read(readers[1]) == bytes([number])
        write(writer, b"next")
        assert [read(reader) for reader in readers] == [b"next", b"next"]

    @law("QUEUE-5")
    def test_the_verb_of_the_other_kind_of_message_is_refused_and_the_message_stays(self) -> None:
        writer, (reader,) = self.queue()
        sent(writer, "a value")
        raises(UnsupportedError, lambda: read(reader))
        assert received(reader) == "a value"
        write(writer, b"bytes")
        raises(UnsupportedError, lambda: received(reader))
        assert read(reader) == b"bytes"

    @law("QUEUE-5")
    def test_values_and_chunks_come_in_one_order(self) -> None:
        writer, (reader,) = self.queue()

        def take() -> list[Any]:
            return [received(reader) if at % 3 else read(reader) for at in range(60)]

        taking = Call(take)
        for at in range(60):
            if at % 3:
                sent(writer, at)
            else:
                write(writer, str(at).encode())
        wanted = [at if at % 3 else str(at).encode() for at in range(60)]
        assert not wrong(taking.result(), wanted)

    # -- room ------------------------------------------------------------------------------------

    @law("QUEUE-5")
    def test_as_many_messages_lie_unread_as_there_are_chunks(self) -> None:
        for chunks in (1, CHUNKS, 10):
            writer, _ = self.queue(2, max_chunks=chunks)
            held = fill(writer)
            assert held == chunks, f"{held} messages lie unread, and there are {chunks} chunks"

    @law("QUEUE-5")
    def test_the_slowest_reader_decides_and_each_message_it_takes_makes_room_for_one(self) -> None:
        writer, (slow, fast) = self.queue(2)
        assert fill(writer) == CHUNKS
        assert not wrong([received(fast) for _ in range(CHUNKS)], range(CHUNKS))
        raises(TimeoutError, lambda: writer.enqueue("no room", timeout=0.2))
        assert received(slow) == 0
        sent(writer, "room")
        raises(TimeoutError, lambda: writer.enqueue("no room", timeout=0.2))
        assert received(fast) == "room", "a message that had timed out was sent all the same"
        assert not wrong([received(slow) for _ in range(CHUNKS)], [*range(1, CHUNKS), "room"])

    @law("QUEUE-5")
    def test_a_message_that_waited_for_room_goes_on_when_there_is_some(self) -> None:
        writer, (reader,) = self.queue()
        held = fill(writer)
        waiting = Call(lambda: writer.enqueue("last", timeout=waits.patience_s))
        assert waiting.is_blocked(), "it did not wait for room"
        assert received(reader) == 0
        waiting.result()
        assert not wrong([received(reader) for _ in range(held)], [*range(1, held), "last"])

    @law("QUEUE-5")
    def test_the_writers_chunk_waits_for_room_too(self) -> None:
        writer, (reader,) = self.queue()
        fill(writer)

        def acquire() -> None:
            with writer.acquire_write(1, timeout=0.2):
                pass

        raises(TimeoutError, acquire)
        assert received(reader) == 0
        write(writer, b"z")
        assert not wrong([received(reader) for _ in range(CHUNKS - 1)], range(1, CHUNKS))
        assert read(reader) == b"z"
