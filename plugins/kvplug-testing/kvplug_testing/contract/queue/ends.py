"""The two ends of a queue, for the general laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Final

from kvplug.transport import MessageQueue, QueueHandle
from kvplug_testing import peers, waits
from kvplug_testing.comparison import UnlikeError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import Calls, End, Ends, fields_of, given
from kvplug_testing.contract.general import General
from kvplug_testing.contract.queue.suite import CHUNK, CHUNKS, MIB, QueueSuite, fill, read, write

_SIZES: Final = (MIB, 1, 2 * CHUNK, 1000)
"""Bytes of the values of exchanges, one after the other: some are larger than a chunk."""


class QueueEnd(End):
    """The writer, or the only reader."""

    def __init__(self, role: str, queue: MessageQueue, most_bytes: int) -> None:
        self.role = role
        self.awaits = "reader" if role == "writer" else "writer"
        self.leaves = role == "reader"  # a reader that left is no error
        self.thing = queue
        self._queue = queue
        self._most_bytes = most_bytes - CHUNK
        self._num_clogging = 0
        self._holding = ExitStack()

    def handle(self) -> dict[str, Any]:
        """The queue's handle, as plain values."""
        return self._queue.export_handle().as_plain()

    def calls(self) -> Calls:
        queue = self._queue
        found: dict[str, Any] = {"export_handle": lambda timeout: queue.export_handle()}
        if queue.is_writer:
            found["readers"] = lambda timeout: queue.readers
        return {**self.blocking(), **found}

    def blocking(self) -> Calls:
        queue, value = self._queue, self._num_clogging
        found: dict[str, Any]
        if queue.is_writer:
            found = {
                "enqueue": lambda *timeout: queue.enqueue(value, *timeout),
                "acquire_write": lambda *timeout: write(queue, **given(timeout)),
            }
        else:
            found = {
                "dequeue": lambda *timeout: queue.dequeue(*timeout),
                "acquire_read": lambda *timeout: read(queue, **given(timeout)),
            }
        return {
            **found,
            "broadcast_object": lambda *timeout: queue.broadcast_object(value, *timeout),
            "wait_until_ready": queue.wait_until_ready,
        }

    def unclogged(self) -> Sequence[str]:
        return ["wait_until_ready"] if self._queue.is_writer else [*self.blocking()]

    def idles(self) -> str:
        return "" if self._queue.is_writer else "dequeue"

    def doomed(self) -> Sequence[str]:
        """A reader that has died is not waited for to be ready."""
        return [each for each in self.blocking() if each != "wait_until_ready" or not self._queue.is_writer]

    def timed(self) -> Calls:
        return {**self.blocking(), "close": self.close}

    def part(self, number: int, timeout: float | None) -> None:
        value = [number, bytes([number % 251]) * min(_SIZES[number % len(_SIZES)], self._most_bytes)]
        if number % 3 == 2:
            got = self._queue.broadcast_object(value if self._queue.is_writer else None, timeout)
        elif self._queue.is_writer:
            self._queue.enqueue(value, timeout=timeout)
            return
        else:
            got = self._queue.dequeue(timeout=timeout)
        assert got == value, f"{repr(got)[:80]} came, and it is not value {number}"

    def clog(self) -> int:
        if self._queue.is_writer:
            self._num_clogging = fill(self._queue)
        return self._num_clogging

    def drain(self, count: int) -> None:
        got = [self._queue.dequeue(timeout=waits.patience_s) for _ in range(count)]
        assert got == [*range(count)], f"{got} came, and 0 to {count - 1} were sent"

    def hold(self) -> None:
        """Begin to read a chunk, and never end."""
        self._holding.enter_context(self._queue.acquire_read(timeout=waits.patience_s))

    def write_half(self) -> None:
        """Send a chunk and values, and write half of another chunk."""
        write(self._queue, bytes(1000), timeout=waits.patience_s)
        for number in range(1, CHUNKS - 1):
            self._queue.enqueue(number, timeout=waits.patience_s)
        view = self._holding.enter_context(self._queue.acquire_write(1000, timeout=waits.patience_s))
        view[:500] = b"h" * 500

    def close(self, timeout: float | None) -> None:
        self._queue.close(timeout)

    def abort(self) -> None:
        self._queue.abort()

    def closed(self) -> bool:
        return self._queue.closed


class QueueEnds(Ends):
    """A writer and one reader."""

    roles: ClassVar[Sequence[str]] = ("writer", "reader")
    has_heartbeat = True
    suite: QueueSuite

    def make(self, children: Sequence[peers.Peer | None], context: Mapping[str, Any]) -> list[End | None]:
        ends: list[End | None] = [None, None]
        if children[0] is not None:
            plain = children[0].recv()
        else:
            ends[0] = writer = self._write(context)
            plain = writer.handle()
        if children[1] is not None:
            children[1].send(plain)
        else:
            ends[1] = self._read(plain, context)
        return ends

    def join(self, parent: peers.Parent, role: int, context: Mapping[str, Any]) -> End:
        if role:
            return self._read(parent.recv(None), context)
        writer = self._write(context)
        parent.send(writer.handle())
        return writer

    def _write(self, context: Mapping[str, Any]) -> QueueEnd:
        fields = fields_of(context)
        if "at_host" in context:
            fields.setdefault("local_reader_ranks", ())
        return self._end(0, self.suite.writer(**fields))

    def _read(self, plain: Any, context: Mapping[str, Any]) -> End:
        return self._end(1, self.suite.attach(QueueHandle.from_plain(plain), **fields_of(context)))

    def _end(self, role: int, queue: MessageQueue) -> QueueEnd:
        return QueueEnd(self.roles[role], queue, self.suite.most_bytes)


class QueueGeneral(QueueSuite, General):
    """The general laws for queues."""

    def ends(self) -> QueueEnds:
        return QueueEnds(self)

    @law("QUEUE-4", "ALL-4")
    def test_a_call_that_waits_costs_next_to_no_processor_time(self) -> None:
        super().test_a_call_that_waits_costs_next_to_no_processor_time()
