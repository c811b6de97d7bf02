"""How queues end: readers that leave or die, and a writer that ends."""

from __future__ import annotations

import logging

import pytest

from kvplug import PeerGoneError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.general import HOW
from kvplug_testing.contract.queue.chunks import read, write
from kvplug_testing.contract.queue.suite import CHUNKS, QueueSuite, all_received, fill, received, sent
from kvplug_testing.contract.queue.waiting import acquire_read, acquire_write
from kvplug_testing.waits import Call, raises, until


class Endings(QueueSuite):
    """The end of the writer, of readers, and of both."""

    @law("ALL-1", "ALL-2")
    @pytest.mark.parametrize("how", HOW)
    def test_a_writer_that_ends_is_gone_after_what_it_had_sent(self, how: str) -> None:
        writer, readers = self.queue(2)
        write(writer, b"chunk")
        for number in range(1, CHUNKS):
            sent(writer, number)
        Call(getattr(writer, how)).result()
        for reader in readers:
            assert read(reader) == b"chunk"
            assert_same([*range(1, CHUNKS)], all_received(reader, CHUNKS - 1).result())
            for call in (reader.dequeue, lambda end=reader: acquire_read(end), reader.wait_until_ready):
                raises(PeerGoneError, call)

    @law("QUEUE-2")
    @pytest.mark.parametrize("how", HOW)
    def test_a_reader_that_ends_is_waited_for_no_longer_and_one_that_died_is_named(
        self, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer, readers = self.queue(3)
        others = readers[0], readers[2]
        held = fill(writer)
        for reader in others:
            assert_same([*range(held)], all_received(reader, held).result())
        waiting = Call(lambda: writer.enqueue("more", timeout=waits.patience_s))
        assert waiting.is_blocked()
        with caplog.at_level(logging.WARNING):
            Call(getattr(readers[1], how)).result()
            waiting.result()
            if how == "abort":
                until(lambda: "rank 1" in caplog.text, what="a warning that names reader rank 1")
        assert bool(caplog.records) == (how == "abort"), f"a reader left, and this was logged: {caplog.text}"
        assert [received(reader) for reader in others] == ["more"] * 2
        for number in range(3 * CHUNKS):
            sent(writer, number)
            assert [received(reader) for reader in others] == [number] * 2
        one, gone, _ = writer.readers
        assert (one.gone, one.died) == ("", False)
        assert gone.gone and gone.died == (how == "abort"), f"of a reader after {how}: {gone}"
        assert how == "close" or gone.lag == held, "how far behind it was is not said"

    @law("QUEUE-2")
    def test_a_reader_that_died_is_not_waited_for_to_be_ready(self) -> None:
        writer, readers = self.queue(2)
        within = waits.patience_s
        calls = [Call(lambda end=end: end.wait_until_ready(within)) for end in (writer, readers[0])]  # type: ignore[misc]
        assert calls[0].is_blocked()
        Call(readers[1].abort).result()
        for call in calls:
            call.result(within + 1)

    @law("QUEUE-2")
    def test_a_writer_without_readers_says_that_nobody_is_left(self) -> None:
        writer, readers = self.queue(2)
        for reader in readers:
            Call(reader.abort).result()
        until(lambda: all(each.gone for each in writer.readers), what="the eviction of both readers")
        for call in (
            lambda: writer.enqueue(1, timeout=waits.patience_s),
            lambda: acquire_write(writer, timeout=waits.patience_s),
        ):
            error = raises(PeerGoneError, call)
            assert "rank 0" in str(error) and "rank 1" in str(error), f"it does not name them: {error}"

    @law("QUEUE-2")
    def test_a_queue_for_nobody_is_no_error(self) -> None:
        writer = self.writer(0)
        for number in range(3 * CHUNKS):
            sent(writer, number)
        assert Call(lambda: writer.broadcast_object("alone", 1.0)).result() == "alone"
