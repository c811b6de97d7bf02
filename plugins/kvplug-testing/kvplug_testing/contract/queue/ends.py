"""The two ends of a queue, for the general laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from kvplug.transport import MessageQueue, NamedExhaustion, QueueEndpoint
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import Calls, End, Ends, Handle, fields_of
from kvplug_testing.contract.general import General
from kvplug_testing.contract.queue.suite import CHUNK, CHUNKS, MIB, QueueSuite, fill, read, write

_SIZES: Final = (MIB, 1, 2 * CHUNK, 1000, 3 * MIB)
"""Bytes of the values of exchanges, one after the other: some are larger than a chunk."""


class QueueEnd(End):
    """The writer, or the only reader."""

    def __init__(self, role: str, queue: MessageQueue) -> None:
        self.role = role
        self.awaits = "reader" if role == "writer" else "writer"
        self.leaves = role == "reader"  # a reader that left is not an error
        self.one_thread = ["enqueue" if role == "writer" else "dequeue"]
        self.thing = queue
        self._num_clogging = 0
        self._holding = ExitStack()

    def calls(self) -> Calls:
        return self.blocking()

    def untimed(self) -> dict[str, Any]:
        handle = {"export_handle": self.thing.export_handle}
        return handle | {"readers": lambda: self.thing.readers} if self.thing.is_writer else handle

    def blocking(self) -> Calls:
        queue, value = self.thing, self._num_clogging
        if queue.is_writer:
            found = {"enqueue": partial(queue.enqueue, value), "acquire_write": partial(write, queue)}
        else:
            found = {"dequeue": queue.dequeue, "acquire_read": partial(read, queue)}
        return {
            **found,
            "broadcast_object": partial(queue.broadcast_object, value),
            "wait_until_ready": queue.wait_until_ready,
        }

    def unclogged(self) -> Sequence[str]:
        return ["wait_until_ready"] if self.thing.is_writer else [*self.blocking()]

    def idles(self) -> str:
        return "" if self.thing.is_writer else "dequeue"

    def doomed(self) -> Sequence[str]:
        """A reader that has died is not waited for to be ready."""
        return [each for each in self.blocking() if each != "wait_until_ready" or not self.thing.is_writer]

    def exchange(self, content: Any, timeout: float | None) -> Any:
        queue, is_writer = self.thing, self.thing.is_writer
        if content[0] % 3 == 2:
            value = content if is_writer else None
            return self.once("broadcast", lambda: queue.broadcast_object(value, timeout=timeout))
        if not is_writer:
            return self.once("dequeue", lambda: queue.dequeue(timeout=timeout))
        self.once("enqueue", lambda: queue.enqueue(content, timeout=timeout))
        return content

    def clog(self) -> int:
        if self.thing.is_writer:
            self._num_clogging = fill(self.thing)
        return self._num_clogging

    def drain(self, count: int) -> None:
        got = [self.thing.dequeue(timeout=waits.patience_s) for _ in range(count)]
        assert got == [*range(count)], f"{got} came, and 0 to {count - 1} were sent"

    def hold(self) -> None:
        """Begin to read a chunk, and never end."""
        self._holding.enter_context(self.thing.acquire_read(timeout=waits.patience_s))

    def write_half(self) -> None:
        """Send a chunk and values, and write half of another chunk."""
        write(self.thing, bytes(1000), timeout=waits.patience_s)
        for number in range(1, CHUNKS - 1):
            self.thing.enqueue(number, timeout=waits.patience_s)
        view = self._holding.enter_context(self.thing.acquire_write(1000, timeout=waits.patience_s))
        view[:500] = b"h" * 500


class QueueEnds(Ends):
    """A writer, and as many readers as the context has."""

    has_heartbeat = True
    num_exchanges = len(_SIZES)
    suite: QueueSuite

    def __init__(self, suite: QueueSuite, context: Mapping[str, Any]) -> None:
        super().__init__(suite, {"n_reader": 1, **context})
        self.roles = ["writer", *["reader"] * self.context["n_reader"]]  # type: ignore[misc]

    def prepare(self) -> None:
        fields = fields_of(self.context)
        if "at_host" in self.context:
            fields.setdefault("local_reader_ranks", ())
        with NamedExhaustion("building a message queue"):  # as kvplug's own builder does
            self._endpoint = self.suite.endpoint(**fields)

    def offer(self) -> dict[str, Any]:
        self._writer = self._endpoint.create()
        self.suite.later(self._writer.abort)
        return self._writer.export_handle().as_plain()

    def accept(self) -> End:
        return QueueEnd("writer", self._writer)

    def connect(self, role: int, contact: Any) -> End:
        handle = QueueEndpoint.Handle.from_plain(contact)
        reader = self._endpoint.create_from_handle(handle, role - 1, timeout=self.timeout_s)
        self.suite.later(reader.abort)
        return QueueEnd("reader", reader)

    def content(self, role: int, number: int) -> Any:
        nbytes = min(_SIZES[number % len(_SIZES)], self.suite.most_bytes - CHUNK)
        return [number, bytes([number % 251]) * nbytes]


class QueueGeneral(QueueSuite, General):
    """The general laws for queues."""

    def ends(self, **context: Any) -> QueueEnds:
        return QueueEnds(self, context)

    def queue(self, n_reader: int = 1, **context: Any) -> tuple[MessageQueue, list[MessageQueue]]:
        """The writer of a queue, and its readers, all of which have attached."""
        ends: list[Any] = self.ends(n_reader=n_reader, **context).make([None] * (n_reader + 1))
        writer, *readers = (each.thing for each in ends)
        return writer, readers

    def _partners(self, ends: Sequence[Handle]) -> Sequence[Handle]:
        return ends

    @law("QUEUE-4", "ALL-4")
    def test_a_call_that_waits_uses_hardly_any_processor_time(self) -> None:
        super().test_a_call_that_waits_uses_hardly_any_processor_time()
