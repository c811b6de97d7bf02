"""Delivery (law QUEUE-1): every message arrives once, in order, from the first one, unchanged."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from kvplug import TransportError, UnsupportedError
from kvplug.transport import MessageQueue
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import (
    CHUNK,
    QUICK_BYTES,
    QueueSuite,
    all_received,
    received,
    sent,
    wrong,
)
from kvplug_testing.waits import Call, raises, until

PLAIN: dict[str, Any] = {
    "None": None,
    "bool": True,
    "int": -(2**63),
    "large int": 2**64 - 1,
    "float": 0.1,
    "str": "h\u00e9\u00df\u6f22",
    "empty str": "",
    "bytes": bytes(range(256)),
    "list": [1, [2, [3, None]]],
    "tuple": (1, (2.5, "x"), ()),
    "set": {1, 2, "three"},
    "frozenset": frozenset({1, (2, 3)}),
    "dict": {"a": 1, 2: b"b", None: {}},
    "dict with tuples as keys": {(1, 2): "a"},
}

TENSORS = (16, CHUNK // 2, 3 * CHUNK)
"""Sizes of tensors in bytes: a small one, one that fits into a chunk, and one that does not."""


class Messages(QueueSuite):
    """Values, from the writer to every reader."""

    @law("QUEUE-1")
    @pytest.mark.parametrize("kind", list(PLAIN))
    def test_a_value_of_each_kind_arrives_as_it_was(self, kind: str) -> None:
        writer, readers = self.queue(2)
        sent(writer, PLAIN[kind])
        for reader in readers:
            assert not wrong([received(reader)], [PLAIN[kind]])

    @law("QUEUE-1")
    def test_tensors_and_dtypes_arrive_with_their_bits(self) -> None:
        torch = pytest.importorskip("torch")

        values = [
            torch.arange(12, dtype=torch.int64).reshape(3, 4),
            torch.randn(5, 7).to(torch.bfloat16),
            torch.tensor(2.5),
            torch.empty(0, 3),
            torch.randn(6, 8).t()[::2],
            torch.tensor([True, False]),
            {"key": [torch.ones(2), (torch.zeros(1, dtype=torch.float16),)]},
        ]
        writer, readers = self.queue(2)
        for value in values:
            sent(writer, value)
            for reader in readers:
                got = received(reader)
                assert_same(value, got)
        sent(writer, torch.bfloat16)
        assert [received(reader) for reader in readers] == [torch.bfloat16] * 2

    @law("QUEUE-1")
    def test_numpy_arrays_arrive_with_their_bits(self) -> None:
        numpy = pytest.importorskip("numpy")
        writer, (reader,) = self.queue()
        for dtype in ("bool", "uint8", "int64", "float32", "complex128"):
            for shape in ((), (0,), (7,), (3, 5)):
                value = numpy.arange(max(1, int(numpy.prod(shape)))).astype(dtype)[: int(numpy.prod(shape))]
                value = value.reshape(shape)
                sent(writer, value)
                got = received(reader)
                assert_same(value, got)

    @law("QUEUE-1", level="long")
    def test_each_reader_gets_thousands_of_messages_once_and_in_order(self) -> None:
        count = 3_000
        writer, readers = self.queue(3)
        calls = [all_received(reader, count) for reader in readers]
        for number in range(count):
            sent(writer, number)
        for reader, call in zip(readers, calls, strict=True):
            fault = wrong(call.result(), range(count))
            assert not fault, f"at reader {reader.rank}, {fault}"

    @law("QUEUE-1")
    def test_readers_of_different_speed_get_the_same(self) -> None:
        writer, readers = self.queue(3)
        pauses = {0: 0.0, 1: 0.001, 2: 0.005}

        def slowly(reader: Any) -> list[Any]:
            got = []
            for _ in range(100):
                got.append(reader.dequeue(timeout=waits.patience_s))
                time.sleep(pauses[reader.rank])
            return got

        calls = [Call(lambda reader=reader: slowly(reader)) for reader in readers]  # type: ignore[misc]
        for number in range(100):
            sent(writer, (number, "x" * number))
        wanted = [(number, "x" * number) for number in range(100)]
        for reader, call in zip(readers, calls, strict=True):
            fault = wrong(call.result(), wanted)
            assert not fault, f"at reader {reader.rank}, {fault}"

    @law("QUEUE-1")
    def test_a_reader_that_pauses_gets_everything_or_hears_how_many_it_lost(self) -> None:
        """One reader of two sleeps after its tenth message."""
        count, pause_s = 2_000, 1.0
        writer, (busy, sleepy) = self.queue(2)
        within = waits.patience_s + pause_s
        calls = [
            Call(lambda reader=reader, pause_s=pause: taken(reader, count, pause_s, within))  # type: ignore[misc]
            for reader, pause in ((busy, 0.0), (sleepy, pause_s))
        ]
        sending = Call(lambda: [writer.enqueue((at, "x" * 100), timeout=within) for at in range(count)])
        # A reader that finds an error stops reading, and the writer waits for it.
        until(lambda: any(call.ended and (call.value or call.error) for call in calls) or sending.ended, 240)
        for call in calls:
            fault = call.result() if call.ended or sending.ended else ""
            assert not fault, fault
        sending.result()

    @law("QUEUE-1")
    def test_messages_of_all_sizes_arrive_and_those_larger_than_a_chunk_do_too(self) -> None:
        # Each small one, since a queue may carry values up to a size of its own in another way.
        sizes = [*range(1100), CHUNK - 64, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 1, 20 * CHUNK, 2]
        sizes = [size for size in sizes if size <= self.most_bytes]
        writer, readers = self.queue(2)
        calls = [all_received(reader, len(sizes)) for reader in readers]
        values = [bytes([at % 256]) * size for at, size in enumerate(sizes)]
        for value in values:
            sent(writer, value)
        for call in calls:
            got = call.result()
            assert_same(values, got)

    @law("QUEUE-1")
    def test_a_tensor_larger_than_a_chunk_arrives(self) -> None:
        torch = pytest.importorskip("torch")

        value = {"kv": torch.randn(min(self.most_bytes, QUICK_BYTES) // 8), "name": "layer 3"}
        writer, (reader,) = self.queue()
        call = all_received(reader, 1)
        sent(writer, value)
        (got,) = call.result()
        assert_same(value, got)

    @law("QUEUE-1")
    @pytest.mark.parametrize("nbytes", TENSORS)
    def test_what_the_writer_or_a_reader_changes_afterwards_changes_nothing_for_others(
        self, nbytes: int
    ) -> None:
        torch = pytest.importorskip("torch")

        value = {"list": [1, 2], "tensor": torch.zeros(nbytes // 4)}
        writer, readers = self.queue(2)
        sent(writer, value)
        value["list"].append(3)
        value["tensor"].fill_(7)
        first = received(readers[0])
        assert (first["list"], first["tensor"].sum().item()) == ([1, 2], 0.0), (
            "the writer's change came along"
        )
        first["list"].append(4)
        first["tensor"].fill_(8)
        second = received(readers[1])
        assert second["list"] == [1, 2], "a reader sees what another one appended"
        assert second["tensor"].sum().item() == 0.0, "a reader sees what another one wrote into its tensor"

    @law("QUEUE-1")
    @pytest.mark.parametrize("nbytes", TENSORS)
    def test_what_was_received_stays_as_it_was_while_more_comes(self, nbytes: int) -> None:
        torch = pytest.importorskip("torch")

        writer, (reader,) = self.queue()
        call = all_received(reader, 40)
        for number in range(40):
            sent(writer, torch.full((nbytes // 4,), number, dtype=torch.int32))
        for number, got in enumerate(call.result()):
            wanted = torch.full((nbytes // 4,), number, dtype=torch.int32)
            assert_same(wanted, got, f"tensor {number} was overwritten by a later one")

    @law("QUEUE-1")
    def test_a_reader_that_attaches_late_gets_everything_from_the_first(self) -> None:
        writer = self.writer(2)
        first = self.reader(writer, 0)
        for number in range(3):
            sent(writer, number)
        assert [received(first) for _ in range(3)] == [0, 1, 2]
        late = self.reader(writer, 1)
        sent(writer, 3)
        assert not wrong([received(late) for _ in range(4)], range(4))

    @law("QUEUE-1")
    def test_getting_ready_late_loses_nothing(self) -> None:
        writer, readers = self.queue(2)
        sent(writer, "first")
        within = waits.patience_s
        calls = [Call(lambda end=end: end.wait_until_ready(within)) for end in (writer, *readers)]  # type: ignore[misc]
        for call in calls:
            call.result(within + 1)
        sent(writer, "second")
        for reader in readers:
            assert not wrong([received(reader), received(reader)], ["first", "second"])

    @law("QUEUE-1")
    def test_broadcast_object_gives_all_ends_the_same(self) -> None:
        writer, readers = self.queue(2)
        within = waits.patience_s
        for value in (None, {"step": 1}, [1, 2]):
            calls = [Call(lambda end=end: end.broadcast_object(timeout=within)) for end in readers]  # type: ignore[misc]
            assert Call(lambda value=value: writer.broadcast_object(value, within)).result() == value  # type: ignore[misc]
            assert [call.result() for call in calls] == [value, value]

    @law("QUEUE-1")
    def test_a_value_that_is_not_carried_is_refused_and_the_next_one_passes(self) -> None:
        class Own:
            pass

        writer, (reader,) = self.queue()
        for value in (Own(), {"a": [Own()]}, len, 2**70):
            raises(UnsupportedError, lambda value=value: writer.enqueue(value))  # type: ignore[misc]
        sent(writer, "fine")
        assert received(reader) == "fine", "something of a refused value was sent"

    @law("QUEUE-1")
    def test_each_end_has_its_own_verbs(self) -> None:
        writer, (reader,) = self.queue()
        assert (writer.is_writer, writer.rank) == (True, None)
        assert (reader.is_writer, reader.rank) == (False, 0)
        raises(UnsupportedError, lambda: writer.dequeue(timeout=0.1))
        raises(UnsupportedError, lambda: reader.enqueue(1, timeout=0.1))
        sent(writer, 1)
        assert received(reader) == 1


def taken(reader: MessageQueue, count: int, pause_s: float, within: float) -> str:
    """The first error in the numbers that a reader receives; empty if each arrives or is reported as lost."""
    number = lost = 0
    while number < count:
        if number == 10:
            time.sleep(pause_s)
        try:
            got, _ = reader.dequeue(timeout=within)
        except TransportError as e:
            said = re.search(r"\b(\d[\d,]*) messages?\b", str(e))
            if said is None:
                return f"reader rank {reader.rank} is not told how many messages it lost: {e}"
            number += int(said[1].replace(",", ""))
            lost += 1
            continue
        if got != number:
            after = f"after {lost} errors of loss, " if lost else ""
            return (
                f"{after}reader rank {reader.rank} got message {got:,} where {number:,} was due, in silence"
            )
        number += 1
    return "" if number == count else f"{number - count:,} more messages were lost than were sent"
