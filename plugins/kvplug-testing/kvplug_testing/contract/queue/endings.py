"""How queues end: closing, aborting, readers that leave or die, a writer that ends, and leaks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvplug import ClosedError, PeerGoneError
from kvplug.transport import MessageQueue
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than
from kvplug_testing.contract.queue.chunks import read, write
from kvplug_testing.contract.queue.suite import CHUNKS, QueueSuite, fill, received, sent, wrong
from kvplug_testing.contract.queue.waiting import acquire_read, acquire_write
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.waits import Call, raises, until

ROUNDS = 1_000


def verbs_of(queue: MessageQueue) -> dict[str, Callable[[], Any]]:
    """All methods of an end, by name."""
    found: dict[str, Callable[[], Any]] = {
        "export_handle": queue.export_handle,
        "wait_until_ready": lambda: queue.wait_until_ready(0.1),
        "broadcast_object": lambda: queue.broadcast_object(1, 0.1),
    }
    if queue.is_writer:
        found["enqueue"] = lambda: queue.enqueue(1, timeout=0.1)
        found["acquire_write"] = lambda: acquire_write(queue, timeout=0.1)
        found["readers"] = lambda: queue.readers
    else:
        found["dequeue"] = lambda: queue.dequeue(timeout=0.1)
        found["acquire_read"] = lambda: acquire_read(queue, timeout=0.1)
    return found


class Endings(QueueSuite):
    """The end of the writer, of readers, and of both."""

    @law("ALL-1")
    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_afterwards_every_call_says_that_it_is_closed(self, end: str) -> None:
        writer, (reader,) = self.queue()
        sent(writer, 1)
        for queue in (reader, writer):
            Call(getattr(queue, end)).result()
            assert queue.closed, "it was closed, and says that it is not"
            for call in verbs_of(queue).values():
                raises(ClosedError, call)

    @law("ALL-1")
    def test_ending_twice_is_ending_once(self) -> None:
        writer, (reader,) = self.queue()
        for queue in (reader, writer):
            for end in (queue.close, queue.close, queue.abort, queue.abort, queue.close):
                Call(end).result()

    @law("ALL-1")
    @pytest.mark.parametrize("end", ["close", "abort"])
    @pytest.mark.parametrize("verb", ["dequeue", "acquire_read", "wait_until_ready"])
    def test_a_reader_that_waits_is_woken_when_it_is_closed(self, verb: str, end: str) -> None:
        _, readers = self.queue(2)
        reader = readers[0]
        call = _blocked(reader, verb)
        Call(getattr(reader, end)).result()
        call.raised(ClosedError)

    @law("ALL-1")
    @pytest.mark.parametrize("verb", ["enqueue", "acquire_write", "wait_until_ready"])
    def test_a_writer_that_waits_is_woken_when_it_is_aborted(self, verb: str) -> None:
        writer, _ = self.queue(2)
        fill(writer)
        call = _blocked(writer, verb)
        Call(writer.abort).result()
        call.raised(ClosedError)

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
    @pytest.mark.parametrize("verb", ["dequeue", "acquire_read", "wait_until_ready"])
    def test_a_reader_that_waits_hears_that_the_writer_has_ended(self, verb: str) -> None:
        writer, readers = self.queue(2)
        reader = readers[1]
        call = _blocked(reader, verb)
        Call(writer.abort).result()
        call.raised(PeerGoneError)

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
        caplog.set_level(logging.ERROR, "kvplug_testing.faults")  # a plan of which nothing has happened
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

    @law("ALL-7")
    def test_queues_that_have_ended_leave_nothing(self) -> None:
        before = peers.Resources.of()
        for politely in (True, False):
            for _ in range(5):
                writer, readers = self.queue(2)
                sent(writer, "x" * 1000)
                received(readers[0])
                for end in (*readers, writer):
                    Call(end.close if politely else end.abort).result()
        until(
            lambda: not peers.Resources.of().beyond(before),
            what="the end of everything that ten queues had opened",
        )

    @law("ALL-7", level="full", timeout_s=300)
    def test_a_thousand_queues_leave_no_more_than_ten(self) -> None:
        def one_round() -> None:
            with self.endpoint().create() as writer, self.attach(writer.export_handle()) as reader:
                sent(writer, b"x" * 10_000)
                assert len(received(reader)) == 10_000

        for _ in range(10):
            one_round()
        before = _resident_kib()
        for _ in range(ROUNDS):
            one_round()
        grown = _resident_kib() - before
        assert grown < 30_000, f"{ROUNDS:,} queues came and went, and {grown:,} KiB of memory stayed"

    @law("ALL-6", needs="forked_processes", level="quick")
    def test_in_a_forked_child_everything_is_closed_and_the_parents_goes_on(self) -> None:
        child = self.start(_forks, self.suite_ref())
        assert child.result() == {"child": [], "parent": ["after the fork"]}

    @law("ALL-6", needs="forked_processes")
    def test_a_forked_child_holds_none_of_the_descriptors(self) -> None:
        before = in_forked_child(held)
        writer, (reader,) = self.queue()
        for number in range(2):
            sent(writer, number)
            assert received(reader) == number
            assert not (more := more_than(before)), f"a forked child holds {more}"
        sent(writer, "on")
        assert received(reader) == "on"


def _forks(parent: peers.Parent, suite_ref: dict[str, Any]) -> dict[str, Any]:
    """In a separate process: make both ends, fork, and call all methods in the forked child."""
    import os
    import warnings

    suite = suite_from_ref(suite_ref)
    end = suite.endpoint()
    with end.create() as writer, end.create_from_handle(writer.export_handle(), 0) as reader:
        seen, told = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what this tests
            pid = os.fork()
        if pid == 0:
            try:
                os.write(told, "|".join([*_not_closed(writer, reader), "end"]).encode())
            finally:
                os._exit(0)
        os.close(told)
        with open(seen, encoding="utf-8") as answer:
            words = answer.read().split("|")
        os.waitpid(pid, 0)
        writer.enqueue("after the fork", timeout=10)
        child = words[:-1] if words[-1] == "end" else [*words, "it died"]
        return {"child": child, "parent": [reader.dequeue(timeout=10)]}


def _not_closed(*ends: MessageQueue) -> list[str]:
    """The calls that did not raise ``ClosedError``, and the ``close`` or ``abort`` calls that raised."""
    found = []
    for end in ends:
        for name, call in verbs_of(end).items():
            try:
                call()
                found.append(f"{name} worked")
            except ClosedError:
                continue
            except Exception as e:
                found.append(f"{name} raised {e!r}")
        for last in (end.close, end.abort):
            try:
                last()
            except Exception as e:
                found.append(f"{last.__name__} raised {e!r}")
    return found


def _resident_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def _blocked(end: MessageQueue, verb: str) -> Call:
    """A blocked call of this method, without a timeout."""
    calls: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: end.enqueue("x", timeout=None),
        "acquire_write": lambda: acquire_write(end, timeout=None),
        "dequeue": lambda: end.dequeue(timeout=None),
        "acquire_read": lambda: acquire_read(end, timeout=None),
        "wait_until_ready": lambda: end.wait_until_ready(None),
    }
    call = Call(calls[verb])
    assert call.is_blocked()
    return call


def _told_of(name: str, caplog: pytest.LogCaptureFixture) -> bool:
    return any(name in record.getMessage() for record in caplog.records)
