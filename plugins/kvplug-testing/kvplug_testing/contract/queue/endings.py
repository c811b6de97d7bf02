"""How queues end: closing, aborting, readers that leave or die, a writer that ends, and leaks."""

from __future__ import annotations

import contextlib
import logging

import pytest

from kvplug import PeerGoneError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.chunks import read, write
from kvplug_testing.contract.queue.suite import CHUNKS, QueueSuite, fill, received, sent, wrong
from kvplug_testing.contract.queue.waiting import acquire_read, acquire_write
from kvplug_testing.waits import Call, raises, until


class Endings(QueueSuite):
    """The end of the writer, of readers, and of both."""

    @law("ALL-1")
    def test_a_with_block_closes_and_one_that_raises_aborts(self) -> None:
        writer, readers = self.queue(2)
        with readers[0]:
            pass
        with contextlib.suppress(ZeroDivisionError), readers[1]:
            raise ZeroDivisionError
        assert [reader.closed for reader in readers] == [True, True]
        until(lambda: [each.died for each in writer.readers] == [False, True], what="one left and one died")

    # -- the writer ends -------------------------------------------------------------------------

    @law("ALL-1", "ALL-2")
    def test_a_writer_that_closes_leaves_nothing_behind_unsent(self) -> None:
        writer, readers = self.queue(2)
        held = fill(writer)
        Call(writer.close).result()
        for reader in readers:
            assert not wrong([received(reader) for _ in range(held)], range(held))
            raises(PeerGoneError, lambda reader=reader: reader.dequeue(timeout=waits.patience_s))  # type: ignore[misc]

    @law("ALL-2")
    def test_a_writer_that_is_aborted_is_gone_after_what_it_had_sent(self) -> None:
        writer, (reader,) = self.queue()
        sent(writer, "value")
        write(writer, b"chunk")
        Call(writer.abort).result()
        assert received(reader) == "value", "what had been enqueued is lost"
        assert read(reader) == b"chunk"
        for call in (reader.dequeue, lambda: acquire_read(reader), reader.wait_until_ready):
            raises(PeerGoneError, call)

    @law("ALL-2")
    def test_nobody_attaches_to_a_writer_that_has_ended(self) -> None:
        writer = self.writer(1)
        handle = writer.export_handle()
        Call(writer.close).result()
        raises(PeerGoneError, lambda: self.attach(handle))

    # -- readers end -------------------------------------------------------------------------------

    @law("QUEUE-2")
    def test_a_reader_that_left_is_waited_for_no_longer_and_is_no_error(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer, readers = self.queue(2)
        fill(writer)
        waiting = Call(lambda: writer.enqueue("more", timeout=waits.patience_s))
        for _ in range(CHUNKS):
            received(readers[0])
        assert waiting.is_blocked()
        with caplog.at_level(logging.WARNING):
            Call(readers[1].close).result()
            waiting.result()
        assert received(readers[0]) == "more"
        one, other = writer.readers
        assert (one.gone, one.died) == ("", False)
        assert other.gone, "the writer does not say that reader rank 1 has left"
        assert not other.died, f"it left, and counts as dead: {other}"
        assert not caplog.records, f"that a reader left was warned of: {caplog.records[0].getMessage()}"

    @law("QUEUE-2")
    def test_a_reader_that_died_is_evicted_named_and_warned_of_and_the_others_go_on(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer, readers = self.queue(3)
        held = fill(writer)
        with caplog.at_level(logging.WARNING):
            Call(readers[1].abort).result()
            until(lambda: writer.readers[1].gone, what="the eviction of reader rank 1")
            until(lambda: _told_of("rank 1", caplog), what="a warning that names reader rank 1")
        assert writer.readers[1].died, f"it was aborted, and counts as having left: {writer.readers[1]}"
        assert writer.readers[1].lag == held, "how far behind it was is not said"
        for reader in (readers[0], readers[2]):
            assert not wrong([received(reader) for _ in range(held)], range(held))
        for number in range(3 * CHUNKS):
            sent(writer, number)
            assert [received(readers[0]), received(readers[2])] == [number, number]

    @law("QUEUE-2")
    def test_a_writer_blocked_by_a_reader_that_dies_goes_on(self) -> None:
        writer, readers = self.queue(2)
        fill(writer)
        for _ in range(CHUNKS):
            received(readers[0])
        call = Call(lambda: writer.enqueue("on", timeout=waits.patience_s))
        assert call.is_blocked()
        Call(readers[1].abort).result()
        call.result()
        assert received(readers[0]) == "on"

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

    # -- leaks ---------------------------------------------------------------------------------------


def _told_of(name: str, caplog: pytest.LogCaptureFixture) -> bool:
    return any(name in record.getMessage() for record in caplog.records)
