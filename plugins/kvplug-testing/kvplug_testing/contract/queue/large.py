"""Values larger than a chunk (law QUEUE-1): to late readers, and many mebibytes to several readers."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from kvplug.net.wire import memory_of
from kvplug.transport import MessageQueue
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import CHUNK, CHUNKS, MIB, QueueSuite, all_received, sent, wrong
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call

READERS = 3
ROUNDS = 3


def layers(nbytes: int, step: int) -> dict[str, Any]:
    """A value of about ``nbytes`` with tensors and an array, different in each step."""
    import numpy
    import torch

    each = nbytes // 4
    key = torch.arange(each // 4, dtype=torch.int32).mul_(2 * step + 1).view(torch.float16)
    value = torch.arange(each // 4, dtype=torch.int32).add_(step).view(torch.bfloat16)
    return {
        "step": step,
        "layers": [(key.view(-1, 64), {"value": value.view(-1, 128).t()})],
        "ids": numpy.arange(each // 4, dtype=numpy.uint64) * (step + 1),
    }


def digest(got: dict[str, Any]) -> list[Any]:
    """A short summary of a value of :func:`layers`."""
    ((key, within),) = got["layers"]
    value, ids = within["value"], got["ids"]
    return [
        got["step"],
        *(f"{it.dtype} {tuple(it.shape)} {zlib.crc32(memory_of(it))}" for it in (key, value)),
        f"{ids.dtype} {ids.shape} {zlib.crc32(ids.tobytes())}",
    ]


def digests(parent: Parent | None, reader: MessageQueue, count: int) -> list[Any]:
    """Read ``count`` values; returns their digests."""
    if parent is not None:
        parent.send("attached")
    return [digest(reader.dequeue(timeout=waits.patience_s)) for _ in range(count)]


class Large(QueueSuite):
    """Values that do not fit into a chunk."""

    @law("QUEUE-1")
    def test_a_reader_that_attaches_late_gets_messages_larger_than_a_chunk(self) -> None:
        values = [b"small", b"a" * (CHUNK + 1), b"b" * (5 * CHUNK), b"small again"]
        writer = self.writer(2)
        first = self.reader(writer, 0)
        for value in values[:CHUNKS]:
            sent(writer, value)
        assert_same(values, all_received(first, len(values)).result())
        late = self.reader(writer, 1)
        assert_same(values, all_received(late, len(values)).result(), "at the late reader")
        sent(writer, values[2])
        for reader in (first, late):
            assert not wrong(all_received(reader, 1).result(), values[2:3])

    @law("QUEUE-1")
    @pytest.mark.parametrize("come", [0, 1])
    def test_messages_larger_than_a_chunk_wait_for_readers_that_have_not_come(self, come: int) -> None:
        values = [bytes([at]) * (3 * CHUNK + at) for at in range(CHUNKS)]
        writer = self.writer(READERS)
        readers = [self.reader(writer, rank) for rank in range(come)]
        for value in values:
            sent(writer, value)
        readers += [self.reader(writer, rank) for rank in range(come, READERS)]
        for reader in readers:
            assert_same(values, all_received(reader, CHUNKS).result(), f"at reader rank {reader.rank}")

    @law("QUEUE-1", level="long", timeout_s=300)
    @pytest.mark.parametrize("mib", [1, 16, 64])
    def test_tensors_and_arrays_in_a_value_of_mebibytes_reach_every_reader(self, mib: int) -> None:
        if mib * MIB > self.most_bytes:
            pytest.skip(f"{self.called} carries values of {self.most_bytes:,} bytes at most (most_bytes)")
        # All readers but one are in other processes if the transport supports that.
        pytest.importorskip("torch")
        pytest.importorskip("numpy")
        nbytes = mib * MIB - 4096  # leaves room for headers
        nbytes -= nbytes % 4096
        writer = self.writer(READERS)
        first, *others = range(READERS)
        local = [first, *(others if self.other_processes else ())]
        calls = [
            Call(lambda reader=reader: digests(None, reader, ROUNDS))  # type: ignore[misc]
            for reader in (self.reader(writer, rank) for rank in local)
        ]
        remote = [self.remote_reader(writer, rank, digests, ROUNDS) for rank in others if rank not in local]
        for child in remote:
            child.recv()
        wanted = []
        for step in range(ROUNDS):
            value = layers(nbytes, step)
            wanted.append(digest(value))
            sent(writer, value)
        for got in [*(call.result(60) for call in calls), *(child.result(60) for child in remote)]:
            fault = wrong(got, wanted)
            assert not fault, f"of {nbytes:,} bytes each, {fault}"
