"""What arrives (law QUEUE-1): every message, once, in order, from the first, as it was sent."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvplug.errors import ConfigError, UnsupportedError, WireError
from kvplug.queue import QueueHandle
from kvplug.testing.contract import base
from kvplug.testing.contract.base import Call, law, raises
from kvplug.testing.contract.queue.suite import (
    CHUNK,
    KIB,
    QueueSuite,
    all_received,
    received,
    sent,
    wrong,
)
from kvplug.wire.values import decode, encode

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


def same(one: Any, other: Any) -> bool:
    """Whether two arrays or tensors are equal in everything."""
    return (
        type(one) is type(other)
        and one.dtype == other.dtype
        and tuple(one.shape) == tuple(other.shape)
        and one.tobytes() == other.tobytes()
        if hasattr(one, "tobytes")
        else type(one) is type(other) and encode(one) == encode(other)
    )


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
                assert same(value, got), f"{value} was sent, and {got} received"
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
                assert same(value, got), f"{value!r} was sent, and {got!r} received"

    @law("QUEUE-1")
    def test_each_reader_gets_thousands_of_messages_once_and_in_order(self) -> None:
        count = 3_000
        writer, readers = self.queue(3)
        calls = [all_received(reader, count) for reader in readers]
        for number in range(count):
            sent(writer, number)
        for reader, call in zip(readers, calls, strict=True):
            fault = wrong(call.result(), range(count))
            assert not fault, f"at reader {reader.rank}, {fault}"

    @law("QUEUE-1", level="full", timeout_s=300)
    def test_tens_of_thousands_of_messages_arrive_once_and_in_order(self) -> None:
        count = 30_000
        writer, readers = self.queue(2)
        calls = [all_received(reader, count) for reader in readers]
        sending = Call(lambda: [writer.enqueue(number, timeout=base.patience_s) for number in range(count)])
        sending.result(240)
        for reader, call in zip(readers, calls, strict=True):
            fault = wrong(call.result(240), range(count))
            assert not fault, f"at reader {reader.rank}, {fault}"

    @law("QUEUE-1")
    def test_readers_of_different_speed_get_the_same(self) -> None:
        writer, readers = self.queue(3)
        pauses = {0: 0.0, 1: 0.001, 2: 0.005}

        def slowly(reader: Any) -> list[Any]:
            got = []
            for _ in range(100):
                got.append(reader.dequeue(timeout=base.patience_s))
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
    def test_messages_of_all_sizes_arrive_and_those_larger_than_a_chunk_do_too(self) -> None:
        sizes = [0, 1, KIB, CHUNK - 64, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 1, 20 * CHUNK, 2]
        sizes = [size for size in sizes if size <= self.most_bytes]
        writer, readers = self.queue(2)
        calls = [all_received(reader, len(sizes)) for reader in readers]
        values = [bytes([at]) * size for at, size in enumerate(sizes)]
        for value in values:
            sent(writer, value)
        for call in calls:
            got = call.result()
            assert [len(value) for value in got] == sizes
            assert got == values, "a message came with other bytes"

    @law("QUEUE-1")
    def test_a_tensor_larger_than_a_chunk_arrives(self) -> None:
        torch = pytest.importorskip("torch")

        value = {"kv": torch.randn(self.most_bytes // 8), "name": "layer 3"}
        writer, (reader,) = self.queue()
        call = all_received(reader, 1)
        sent(writer, value)
        (got,) = call.result()
        assert got["name"] == "layer 3"
        assert torch.equal(got["kv"], value["kv"]), "the tensor came with other bytes"

    @law("QUEUE-1")
    def test_what_the_writer_or_a_reader_changes_afterwards_changes_nothing_for_others(self) -> None:
        torch = pytest.importorskip("torch")

        value = {"list": [1, 2], "tensor": torch.zeros(4)}
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
    def test_what_was_received_stays_as_it_was_while_more_comes(self) -> None:
        torch = pytest.importorskip("torch")

        writer, (reader,) = self.queue()
        call = all_received(reader, 40)
        for number in range(40):
            sent(writer, torch.full((64,), number))
        for number, got in enumerate(call.result()):
            assert got.tolist() == [number] * 64, f"tensor {number} was overwritten by a later one"

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
        within = base.patience_s
        calls = [Call(lambda end=end: end.wait_until_ready(within)) for end in (writer, *readers)]  # type: ignore[misc]
        for call in calls:
            call.result(within + 1)
        sent(writer, "second")
        for reader in readers:
            assert not wrong([received(reader), received(reader)], ["first", "second"])

    @law("QUEUE-1")
    def test_broadcast_object_gives_all_ends_the_same(self) -> None:
        writer, readers = self.queue(2)
        within = base.patience_s
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

    # -- who takes part --------------------------------------------------------------------------

    @law("QUEUE-1")
    def test_a_handle_survives_being_encoded(self) -> None:
        writer = self.writer(1)
        plain = decode(encode(writer.export_handle().as_plain()))
        reader = self.attach(QueueHandle.from_plain(plain))
        self.later(reader.abort)
        assert reader.export_handle() == writer.export_handle()
        sent(writer, 5)
        assert received(reader) == 5

    @law("QUEUE-1")
    def test_readers_are_named_by_any_ranks(self) -> None:
        writer = self.endpoint().create([7, 2])
        self.later(writer.abort)
        assert writer.export_handle().reader_ranks == (7, 2)
        readers = [self.reader(writer, rank) for rank in (2, 7)]
        assert [reader.rank for reader in readers] == [2, 7]
        assert [each.rank for each in writer.readers] == [7, 2]
        sent(writer, "x")
        assert [received(reader) for reader in readers] == ["x", "x"]

    @law("QUEUE-1")
    def test_a_rank_that_is_no_reader_is_refused(self) -> None:
        writer = self.writer(2)
        handle = writer.export_handle()
        for rank in (2, -1):
            error = raises(ConfigError, lambda rank=rank: self.attach(handle, rank))  # type: ignore[misc]
            assert "0, 1" in str(error), f"it does not say who the readers are: {error}"

    @law("QUEUE-1")
    def test_a_rank_attaches_once_also_after_it_has_left(self) -> None:
        writer, (reader,) = self.queue()
        handle = writer.export_handle()
        raises(ConfigError, lambda: self.attach(handle))
        sent(writer, 1)
        assert received(reader) == 1, "an attempt to take its place disturbed the reader"
        reader.close()
        raises(ConfigError, lambda: self.attach(handle))

    @law("QUEUE-1")
    def test_a_handle_of_another_queue_transport_is_refused(self) -> None:
        handle = self.writer(1).export_handle()
        other = QueueHandle.from_plain({**handle.as_plain(), "transport": "some-other"})
        raises(WireError, lambda: self.attach(other))

    @law("QUEUE-1")
    def test_two_ranks_with_one_name_are_refused(self) -> None:
        raises(ConfigError, lambda: self.endpoint().create([1, 1]))
