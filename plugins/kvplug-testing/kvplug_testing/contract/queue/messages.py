"""Delivery (law QUEUE-1): every message arrives once, in order, from the first one, unchanged."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from kvplug import TransportError, UnsupportedError
from kvplug.transport import MessageQueue
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import CHUNK, CHUNKS, MIB, QueueSuite, all_received, received, sent
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call, raises, until

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
        self._arrive(PLAIN)

    @law("QUEUE-1")
    def test_tensors_arrays_and_dtypes_arrive_with_their_bits(self) -> None:
        torch = pytest.importorskip("torch")
        numpy = pytest.importorskip("numpy")
        arrays = [
            numpy.ones(shape).astype(dtype)
            for dtype in ("bool", "uint8", "int64", "float32", "complex128")
            for shape in ((), (0,), (3, 5))
        ]
        tensors = [
            torch.arange(12, dtype=torch.int64).reshape(3, 4),
            torch.randn(5, 7).to(torch.bfloat16),
            torch.tensor(2.5),
            torch.empty(0, 3),
            torch.randn(6, 8).t()[::2],
            torch.tensor([True, False]),
            {"key": [torch.ones(2), (torch.zeros(1, dtype=torch.float16),)]},
        ]
        self._arrive([*tensors, torch.bfloat16, *arrays])

    def _arrive(self, values: list[Any]) -> None:
        writer, readers = self.queue(2)
        for value in values:
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
    @pytest.mark.parametrize("mib", [1, 64])
    def test_tensors_in_a_value_of_mebibytes_reach_every_reader(self, mib: int) -> None:
        pytest.importorskip("torch")
        nbytes = min(mib * MIB, self.most_bytes) - 4096  # leaves room for headers
        writer = self.writer(3)
        far = () if self.other_processes else (1, 2)
        near = [self.reader(writer, rank) for rank in range(3) if rank not in far]
        calls = [Call(lambda reader=reader: check_layers(None, reader, nbytes)) for reader in near]  # type: ignore[misc]
        remote = [self.remote_reader(writer.export_handle(), rank) for rank in far]
        for end in remote:
            end.begin(check_layers, nbytes)
        for step in range(3):
            sent(writer, layers(nbytes, step))
        assert {*(call.result(60) for call in calls), *(end.result(60) for end in remote)} == {""}

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
    @pytest.mark.parametrize("nbytes", TENSORS)
    def test_what_the_writer_or_a_reader_changes_afterwards_changes_nothing_for_others(
        self, nbytes: int
    ) -> None:
        torch = pytest.importorskip("torch")
        value = {"list": [1, 2], "tensor": torch.zeros(nbytes // 4)}
        writer, readers = self.queue(2)
        sent(writer, value)
        for end, what in (("", "the writer"), *((reader, "another reader") for reader in readers)):
            if end:
                value = received(end)
                assert_same({"list": [1, 2], "tensor": torch.zeros(nbytes // 4)}, value, what)
            value["list"].append(3)
            value["tensor"].fill_(7)

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
        sent(writer, values[2])
        for reader in (first, late):
            assert_same(values[2], received(reader))

    @law("QUEUE-1")
    def test_getting_ready_late_loses_nothing_and_a_broadcast_gives_all_ends_the_same(self) -> None:
        writer, readers = self.queue(2)
        sent(writer, "first")
        within = waits.patience_s
        calls = [Call(lambda end=end: end.wait_until_ready(within)) for end in (writer, *readers)]  # type: ignore[misc]
        for call in calls:
            call.result(within + 1)
        assert [received(reader) for reader in readers] == ["first"] * 2
        for value in (None, {"step": 1}):
            calls = [Call(lambda end=end: end.broadcast_object(timeout=within)) for end in readers]  # type: ignore[misc]
            assert Call(lambda value=value: writer.broadcast_object(value, within)).result() == value  # type: ignore[misc]
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


def layers(nbytes: int, step: int) -> dict[str, Any]:
    """A value of about ``nbytes`` with tensors, different in each step."""
    import torch

    numbers = torch.arange(nbytes // 512 * 64, dtype=torch.int32).mul_(2 * step + 1)
    value = numbers.add(step).view(torch.bfloat16)
    return {"step": step, "layers": [(numbers.view(torch.float16), {"value": value.view(-1, 128).t()})]}


def check_layers(parent: Parent | None, reader: MessageQueue, nbytes: int) -> str:
    """Read three values of :func:`layers`. Returns what differs; empty if nothing does."""
    found = (difference(layers(nbytes, at), reader.dequeue(timeout=waits.patience_s)) for at in range(3))
    return "; ".join(each for each in found if each)


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
