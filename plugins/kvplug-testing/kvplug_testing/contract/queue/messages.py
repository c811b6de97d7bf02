"""Delivery (law QUEUE-1): every message arrives once, in order, from the first one, unchanged."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from kvplug import ConfigError, TransportError, UnsupportedError
from kvplug.transport import MessageQueue, QueueHandle, WireError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import CHUNK, CHUNKS, MIB, QueueSuite, all_received, received, sent
from kvplug_testing.waits import Call, raises

PLAIN: list[Any] = [
    *(None, True, -(2**63), 2**64 - 1, 0.1, "h\u00e9\u00df\u6f22", "", bytes(range(256))),
    *([1, [2, [3, None]]], (1, (2.5, "x"), ()), {1, 2, "three"}, frozenset({1, (2, 3)})),
    *({"a": 1, 2: b"b", None: {}}, {(1, 2): "a"}),
]
TENSORS = (16, CHUNK // 2, 3 * CHUNK)
"""Sizes of tensors in bytes: a small one, one that fits into a chunk, and one that does not."""


class Messages(QueueSuite):
    """Values, from the writer to every reader."""

    @law("QUEUE-1")
    def test_a_value_of_each_kind_arrives_as_it_was(self) -> None:
        writer, readers = self.queue(2)
        for value in [*PLAIN, *_tensors_and_arrays()]:
            sent(writer, value)
            for reader in readers:
                assert_same(value, received(reader))

    @law("QUEUE-1")
    def test_messages_of_all_sizes_arrive_and_those_larger_than_a_chunk_do_too(self) -> None:
        # Each small one, since a queue may carry values up to a size of its own in another way.
        sizes = [*range(1100), CHUNK - 64, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 1, 20 * CHUNK, 2]
        values = [bytes([at % 256]) * size for at, size in enumerate(sizes) if size <= self.most_bytes]
        writer, readers = self.queue(2)
        calls = [all_received(reader, len(values)) for reader in readers]
        for value in values:
            sent(writer, value)
        for call in calls:
            assert_same(values, call.result())

    @law("QUEUE-1", level="long", timeout_s=300)
    def test_tensors_of_mebibytes_reach_every_reader(self) -> None:
        torch = pytest.importorskip("torch")
        count = (min(64 * MIB, self.most_bytes) - 4096) // 8  # leaves room for headers
        values = [{"layers": [torch.arange(count) * 3**at]} for at in range(3)]
        writer, readers = self.queue(3)
        calls = [all_received(reader, len(values)) for reader in readers]
        for value in values:
            sent(writer, value)
        for call in calls:
            assert_same(values, call.result(60))

    @law("QUEUE-1")
    def test_a_reader_that_pauses_gets_everything_or_hears_how_many_it_lost(self) -> None:
        """One reader of two sleeps after its tenth message."""
        count, pause_s = 2_000, 1.0
        writer, (busy, sleepy) = self.queue(2)
        within = waits.patience_s + pause_s
        calls = [
            Call(lambda: taken(busy, count, 0.0, within)),
            Call(lambda: taken(sleepy, count, pause_s, within)),
        ]
        sending = Call(lambda: [writer.enqueue((at, "x" * 100), timeout=within) for at in range(count)])
        faults = [call.result(240) for call in calls]
        assert not any(faults), faults
        sending.result()

    @law("QUEUE-1")
    @pytest.mark.parametrize("nbytes", TENSORS)
    def test_what_the_writer_or_a_reader_changes_afterwards_changes_nothing_for_others(
        self, nbytes: int
    ) -> None:
        torch = pytest.importorskip("torch")
        value = {"list": [1, 2], "tensor": torch.zeros(nbytes // 4)}
        writer, readers = self.queue(2)
        sent(writer, value)
        for reader in readers:
            value["list"].append(3)
            value["tensor"].fill_(7)
            value = received(reader)
            assert_same({"list": [1, 2], "tensor": torch.zeros(nbytes // 4)}, value)

    @law("QUEUE-1")
    @pytest.mark.parametrize("nbytes", TENSORS)
    def test_what_was_received_stays_as_it_was_while_more_comes(self, nbytes: int) -> None:
        torch = pytest.importorskip("torch")
        values = [torch.full((nbytes // 4,), number, dtype=torch.int32) for number in range(40)]
        writer, (reader,) = self.queue()
        call = all_received(reader, len(values))
        for value in values:
            sent(writer, value)
        assert_same(values, call.result(), "a tensor was overwritten by a later one")

    @law("QUEUE-1")
    def test_a_reader_that_attaches_late_gets_messages_of_all_sizes_from_the_first(self) -> None:
        values = [b"small", b"a" * (CHUNK + 1), b"b" * (5 * CHUNK), b"small again"]
        assert len(values) <= CHUNKS
        writer = self.writer(2)
        first = self.reader(writer, 0)
        for value in values:
            sent(writer, value)
        assert_same(values, all_received(first, len(values)).result())
        late = self.reader(writer, 1)
        assert_same(values, all_received(late, len(values)).result(), "at the late reader")

    @law("QUEUE-1")
    def test_broadcast_object_gives_all_ends_the_same(self) -> None:
        writer, readers = self.queue(2)
        for value in (None, {"step": 1}):
            calls = [Call(lambda end=end: end.broadcast_object(timeout=waits.patience_s)) for end in readers]  # type: ignore[misc]
            assert writer.broadcast_object(value, waits.patience_s) == value
            assert [call.result() for call in calls] == [value, value]

    @law("QUEUE-1")
    def test_a_value_that_is_not_carried_or_not_for_that_end_is_refused_and_the_next_one_passes(self) -> None:
        class Own:
            pass

        writer, (reader,) = self.queue()
        for value in (Own(), {"a": [Own()]}, len, 2**70):
            raises(UnsupportedError, lambda value=value: writer.enqueue(value))  # type: ignore[misc]
        raises(UnsupportedError, lambda: writer.dequeue(timeout=0.1))
        raises(UnsupportedError, lambda: reader.enqueue(1, timeout=0.1))
        sent(writer, "fine")
        assert received(reader) == "fine", "something of a refused value was sent"

    # -- attaching -----------------------------------------------------------------------------

    @law("QUEUE-1")
    def test_a_handle_survives_being_carried_as_json(self) -> None:
        remote = self.spec is not None and self.spec.capabilities.cross_host
        places: list[dict[str, Any]] = [{}, {"local_reader_ranks": ()}] if remote else [{}]
        for where in places:
            writer = self.writer(**where)
            plain = writer.export_handle().as_plain()
            carried = json.loads(json.dumps(plain, default=lambda it: pytest.fail(f"JSON has no {it!r}")))
            reader = self.attach(QueueHandle.from_plain(carried), **where)
            assert reader.export_handle() == writer.export_handle()
            sent(writer, 5)
            assert received(reader) == 5

    @law("QUEUE-1")
    def test_readers_are_named_by_any_ranks(self) -> None:
        writer = self.endpoint().create([7, 2])
        self.later(writer.abort)
        readers = [self.reader(writer, rank) for rank in (2, 7)]
        assert writer.export_handle().reader_ranks == (7, 2)
        assert [end.rank for end in (writer, *readers)] == [None, 2, 7]
        assert [each.rank for each in writer.readers] == [7, 2]
        sent(writer, "x")
        assert [received(reader) for reader in readers] == ["x", "x"]

    @law("QUEUE-1")
    def test_a_rank_attaches_once_and_others_not_at_all(self) -> None:
        writer, (reader, _) = self.queue(2)
        handle = writer.export_handle()
        for rank in (0, 2, -1):
            raises(ConfigError, lambda rank=rank: self.attach(handle, rank))  # type: ignore[misc]
        other = QueueHandle.from_plain({**handle.as_plain(), "transport": "some-other"})
        raises(WireError, lambda: self.attach(other))
        sent(writer, 1)
        assert received(reader) == 1, "an attempt to take its place disturbed the reader"
        reader.close()
        raises(ConfigError, lambda: self.attach(handle))
        raises(ConfigError, lambda: self.endpoint().create([1, 1]))


def _tensors_and_arrays() -> list[Any]:
    """None, without these libraries."""
    try:
        import numpy
        import torch
    except ImportError:
        return []
    return [
        torch.arange(12, dtype=torch.int64).reshape(3, 4),
        torch.randn(5, 7).to(torch.bfloat16),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(6, 8).t()[::2],
        torch.tensor([True, False]),
        {"key": [torch.ones(2), (torch.zeros(1, dtype=torch.float16),)]},
        torch.bfloat16,
        *(
            numpy.ones(shape, dtype)
            for dtype in ("bool", "int64", "complex128")
            for shape in ((), (0,), (3, 5))
        ),
    ]


def taken(reader: MessageQueue, count: int, pause_s: float, within: float) -> str:
    """The first error in the numbers that a reader receives; empty if each arrives or is reported as lost."""
    number = 0
    while number < count:
        if number == 10:
            time.sleep(pause_s)
        try:
            got, _ = reader.dequeue(timeout=within)
        except TransportError as e:
            said = re.search(r"\b(\d[\d,]*) messages?\b", str(e))
            if said is None:
                return f"reader rank {reader.rank} does not learn how many messages it lost: {e}"
            number += int(said[1].replace(",", ""))
            continue
        if got != number:
            return f"reader rank {reader.rank} got message {got:,} where {number:,} was due, in silence"
        number += 1
    return "" if number == count else f"{number - count:,} more messages were lost than were sent"
