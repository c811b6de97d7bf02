"""Delivery (law QUEUE-1): every message arrives once, in order, unchanged; and chunks in place (QUEUE-5)."""

from __future__ import annotations

import re
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import pytest

from kvplug import CapacityError, ConfigError, TimeoutError, TransportError, UnsupportedError
from kvplug.transport import MessageQueue, QueueEndpoint, WireError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import in_time, law
from kvplug_testing.contract.queue.ends import QueueGeneral
from kvplug_testing.contract.queue.suite import (
    CHUNK,
    CHUNKS,
    all_received,
    fill,
    handle_of,
    passes,
    read,
    received,
    sent,
    write,
)
from kvplug_testing.waits import Call, raises

PLAIN: Final[list[Any]] = [
    *(None, True, -(2**63), 2**64 - 1, 0.1, "h\u00e9\u00df\u6f22", "", bytes(range(256))),
    *([1, [2, [3, None]]], (1, (2.5, "x"), ()), {1, 2, "three"}, frozenset({1, (2, 3)})),
    *({"a": 1, 2: b"b", None: {}}, {(1, 2): "a"}),
]
TENSORS: Final = (16, CHUNK // 2, 3 * CHUNK)
"""Sizes of tensors in bytes: a small one, one that fits into a chunk, and one that does not."""
_PAUSE_S: Final = 1.0


class Messages(QueueGeneral):
    """Values and chunks, from the writer to every reader."""

    @law("QUEUE-1")
    def test_a_value_of_each_kind_and_of_any_size_arrives_as_it_was(self) -> None:
        # Each small size, since a queue may carry values up to a size of its own in another way.
        sizes = [*range(1100), CHUNK - 64, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 1, 20 * CHUNK, 2]
        sizes.append(self.most_bytes - 4096)  # leaves room for headers
        values = [bytes([at % 256]) * size for at, size in enumerate(sizes) if size <= self.most_bytes]
        passes(*self.queue(2), *PLAIN, *_tensors_and_arrays(), *values)

    @law("QUEUE-1")
    def test_a_reader_that_pauses_gets_everything_or_an_error_with_the_number_lost(self) -> None:
        """One reader of two sleeps after its tenth message."""
        count, within = 2_000, waits.patience_s + _PAUSE_S
        writer, (busy, sleepy) = self.queue(2)
        calls = [
            Call(lambda: [writer.enqueue((at, "x" * 100), timeout=within) for at in range(count)]),
            Call(lambda: _take_all(busy, count, 0.0, within)),
            Call(lambda: _take_all(sleepy, count, _PAUSE_S, within)),
        ]
        for call in calls:
            call.result(240)

    @law("QUEUE-1")
    @pytest.mark.parametrize("nbytes", TENSORS)
    def test_what_an_end_changes_afterwards_or_what_comes_later_changes_nothing(self, nbytes: int) -> None:
        torch = pytest.importorskip("torch")
        value = {"list": [1, 2], "tensor": torch.zeros(nbytes // 4)}
        writer, readers = self.queue(2)
        sent(writer, value)
        for reader in readers:
            value["list"].append(3)
            value["tensor"].fill_(7)
            value = received(reader)
            assert_same({"list": [1, 2], "tensor": torch.zeros(nbytes // 4)}, value)
        passes(writer, readers, *(torch.full((nbytes // 4,), number) for number in range(40)))

    @law("QUEUE-1")
    def test_a_reader_that_attaches_late_gets_messages_of_all_sizes_from_the_first(self) -> None:
        values = [b"small", b"a" * (CHUNK + 1), b"b" * (5 * CHUNK), b"small again"]
        assert len(values) <= CHUNKS
        writer = self.writer(2)
        passes(writer, [self.reader(writer, 0)], *values)
        late = self.reader(writer, 1)
        assert_same(values, all_received(late, len(values)).result(), "at the late reader")

    @law("QUEUE-1")
    def test_a_value_that_is_not_carried_or_not_for_that_end_is_refused_and_the_next_one_passes(self) -> None:
        class Own:
            pass

        writer, (reader,) = self.queue()
        for value in (Own(), {"a": [Own()]}, len, 2**70):
            raises(UnsupportedError, partial(writer.enqueue, value))
        raises(UnsupportedError, lambda: writer.dequeue(timeout=0.1))
        raises(UnsupportedError, lambda: reader.enqueue(1, timeout=0.1))
        passes(writer, [reader], "fine")

    # -- attaching -----------------------------------------------------------------------------

    @law("QUEUE-1")
    def test_readers_are_named_by_any_ranks_and_each_attaches_once(self) -> None:
        writer = self.endpoint().create([7, 2])
        self.later(writer.abort)
        handle = handle_of(writer)
        readers = [self.attach(handle, rank) for rank in (2, 7)]
        assert handle == writer.export_handle() == readers[0].export_handle()
        assert handle.reader_ranks == (7, 2)
        assert [end.rank for end in (writer, *readers)] == [None, 2, 7]
        assert [each.rank for each in writer.readers] == [7, 2]
        for rank in (7, 0, -1):
            raises(ConfigError, partial(self.attach, handle, rank))
        other = QueueEndpoint.Handle.from_plain({**handle.as_plain(), "transport": "some-other"})
        raises(WireError, lambda: self.attach(other, 7))
        passes(writer, readers, "x")
        readers[1].close()
        raises(ConfigError, lambda: self.attach(handle, 7))
        raises(ConfigError, lambda: self.endpoint().create([1, 1]))

    # -- chunks -------------------------------------------------------------------------------

    @law("QUEUE-5")
    def test_a_chunk_is_read_as_it_was_written_and_its_view_is_valid_in_its_block_alone(self) -> None:
        writer, readers = self.queue(2)
        for data in (b"", b"x", bytes(range(256)) * 16, b"y" * CHUNK):
            in_time(write, writer, data)
            for reader in readers:
                assert_same(data, in_time(read, reader), f"a chunk of {len(data)} bytes")
        with writer.acquire_write() as written:
            assert len(written) == CHUNK
        with readers[0].acquire_read(timeout=waits.patience_s) as view, pytest.raises(TypeError):
            view[:] = written
        for kept in (written, view):
            with pytest.raises(ValueError, match="released"):
                kept[0]
        raises(CapacityError, lambda: write(writer, b"z" * (CHUNK + 1)))

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


def _tensors_and_arrays() -> list[Any]:
    """None, without these libraries."""
    try:
        import numpy
        import torch
    except ImportError:
        return []
    return [
        *(torch.tensor(2.5), torch.empty(0, 3), torch.randn(5, 7).to(torch.bfloat16)),
        *(torch.randn(6, 8).t()[::2], torch.tensor([True, False]), torch.bfloat16),
        {"key": [torch.ones(2), (torch.zeros(1, dtype=torch.float16),)]},
        *(numpy.ones((3, 5), dtype) for dtype in ("bool", "int64", "complex128")),
        *(numpy.array(1), numpy.empty(0)),
    ]


def _take_all(reader: MessageQueue, count: int, pause_s: float, within: float) -> None:
    """Check that each of ``count`` numbers is received or reported as lost."""
    number = 0
    while number < count:
        if number == 10:
            time.sleep(pause_s)
        got = Call(partial(reader.dequeue, timeout=within)).outcome(within + 1)
        if isinstance(got, TransportError):
            lost = re.search(r"\b(\d[\d,]*) messages?\b", str(got))
            assert lost, f"reader rank {reader.rank} gets an error without the number of lost messages: {got}"
            number += int(lost[1].replace(",", ""))
        else:
            assert got[0] == number, f"reader rank {reader.rank} got {got[0]}, and no error about {number}"
            number += 1
    assert number == count, f"{number - count:,} more messages were lost than were sent"


def _leave(block: AbstractContextManager[Any]) -> None:
    """Leave a chunk's block by an exception."""
    with block:
        raise ZeroDivisionError
