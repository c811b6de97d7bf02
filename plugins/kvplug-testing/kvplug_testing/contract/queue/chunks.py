"""Chunks (law QUEUE-5): written and read in place, always released, and limited in number and size."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from kvplug import CapacityError, TimeoutError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import (
    CHUNK,
    CHUNKS,
    QueueSuite,
    all_received,
    fill,
    in_time,
    read,
    received,
    write,
)
from kvplug_testing.waits import Call, raises


class Chunks(QueueSuite):
    """Raw bytes in place, and free chunks."""

    @law("QUEUE-5")
    def test_a_chunk_is_read_as_it_was_written_and_is_as_large_as_the_context_says(self) -> None:
        writer, readers = self.queue(2)
        for data in (b"", b"x", bytes(range(256)) * 16, b"y" * CHUNK):
            in_time(write, writer, data)
            for reader in readers:
                assert_same(data, in_time(read, reader), f"a chunk of {len(data)} bytes")
        with writer.acquire_write() as view:
            assert len(view) == CHUNK
        raises(CapacityError, lambda: write(writer, b"z" * (CHUNK + 1)))

    @law("QUEUE-5")
    def test_a_view_is_valid_in_its_block_alone_and_a_reader_may_not_write(self) -> None:
        writer, readers = self.queue(2)
        with writer.acquire_write(4, timeout=waits.patience_s) as written:
            written[:] = b"abcd"
        with readers[0].acquire_read(timeout=waits.patience_s) as view, pytest.raises(TypeError):
            view[:] = b"bad!"
        for kept in (written, view):
            with pytest.raises(ValueError, match="released"):
                kept[0]
        assert in_time(read, readers[1]) == b"abcd"

    @law("QUEUE-5")
    def test_a_block_that_raises_gives_its_chunk_back(self) -> None:
        """What the writer's block had written was never sent. What the reader's had not read is over."""
        writer, (raises_, other) = self.queue(2)
        for number in range(3 * CHUNKS):
            raises(ZeroDivisionError, lambda: _leave(writer.acquire_write(8, timeout=waits.patience_s)))
            in_time(write, writer, bytes([number]))
            raises(ZeroDivisionError, lambda: _leave(raises_.acquire_read(timeout=waits.patience_s)))
            assert in_time(read, other) == bytes([number])
        in_time(write, writer, b"next")
        assert [in_time(read, reader) for reader in (raises_, other)] == [b"next", b"next"]

    @law("QUEUE-5")
    @pytest.mark.parametrize("chunks", [1, CHUNKS, 10])
    def test_as_many_messages_lie_unread_as_there_are_chunks(self, chunks: int) -> None:
        writer, _ = self.queue(2, max_chunks=chunks)
        assert fill(writer) == chunks

    @law("QUEUE-5")
    def test_the_slowest_reader_decides_and_each_message_it_takes_makes_room_for_one(self) -> None:
        writer, (slow, fast) = self.queue(2)
        assert fill(writer) == CHUNKS
        assert_same([*range(CHUNKS)], all_received(fast, CHUNKS).result())
        raises(TimeoutError, lambda: writer.enqueue("no room", timeout=0.2))
        waiting = Call(lambda: writer.enqueue("room", timeout=waits.patience_s))
        assert waiting.is_blocked(), "it did not wait for room"
        assert received(slow) == 0
        waiting.result()
        raises(TimeoutError, lambda: writer.enqueue("no room", timeout=0.2))
        assert received(fast) == "room", "a message that had timed out was sent all the same"
        assert_same([*range(1, CHUNKS), "room"], all_received(slow, CHUNKS).result())


def _leave(block: AbstractContextManager[Any]) -> None:
    """Leave a chunk's block by an exception."""
    with block:
        raise ZeroDivisionError
