"""The base of the queue suite: queues with readers in this process, and calls of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest

from kvplug import TimeoutError
from kvplug.kit import Kind
from kvplug.transport import Credentials, MessageQueue, QueueEndpoint
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import Contract, in_time
from kvplug_testing.waits import Call

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
CHUNKS = 4
"""The default number of chunks of the tested queues."""


class QueueSuite(Contract):
    """The subject, and how its ends are made. Authors set the class attributes."""

    kind: ClassVar[Kind] = Kind.QUEUE
    timeout_s: ClassVar[float] = 20.0
    """The context's ``timeout_s``: the timeout of a call that gives none."""
    most_bytes: ClassVar[int] = 64 * MIB
    """The largest value that is tried, in bytes. Lower it for a queue that carries less."""

    def make_endpoint(self, context: QueueEndpoint.Context) -> QueueEndpoint:
        """The transport's factory, called. Override it for a transport that is not installed."""
        return self.installed("make_endpoint").load_factory()(context)  # type: ignore[no-any-return]

    # -- ends in this process ------------------------------------------------------------------

    def endpoint(self, **context: Any) -> QueueEndpoint:
        """``context``: fields of the :class:`QueueEndpoint.Context` that differ from this suite's
        defaults."""
        usual = {
            "credentials": Credentials(),
            "max_chunk_bytes": CHUNK,
            "max_chunks": CHUNKS,
            "timeout_s": self.timeout_s,
        }
        return self.make_endpoint(QueueEndpoint.Context(options=self.made_options(), **{**usual, **context}))

    def writer(self, n_reader: int = 1, **context: Any) -> MessageQueue:
        """The writer's end of a new queue."""
        made = self.endpoint(n_reader=n_reader, **context).create()
        self.later(made.abort)
        return made

    def reader(self, writer: MessageQueue, rank: int = 0, **context: Any) -> MessageQueue:
        """A reader of the writer's queue, in this process."""
        return self.attach(handle_of(writer), rank, **context)

    def attach(self, handle: QueueEndpoint.Handle, rank: int = 0, **context: Any) -> MessageQueue:
        """A reader that must attach in time."""
        made: MessageQueue = in_time(self.endpoint(**context).create_from_handle, handle, rank)
        self.later(made.abort)
        return made


# -- calls that must end in time ---------------------------------------------------------------


def handle_of(writer: MessageQueue) -> QueueEndpoint.Handle:
    """The writer's handle, carried as JSON."""
    plain = writer.export_handle().as_plain()
    carried = json.dumps(plain, default=lambda it: pytest.fail(f"JSON has no {it!r}, and a handle has"))
    return QueueEndpoint.Handle.from_plain(json.loads(carried))


def sent(writer: MessageQueue, *values: object) -> None:
    """Enqueue values, for which there must be room in time."""
    for value in values:
        in_time(writer.enqueue, value)


def received(reader: MessageQueue) -> Any:
    """The next value, which must arrive in time."""
    return in_time(reader.dequeue)


def all_received(reader: MessageQueue, count: int) -> Call:
    """Read ``count`` values in a separate thread; fewer if one does not arrive in time."""
    return Call(lambda: [reader.dequeue(timeout=waits.patience_s) for _ in range(count)])


def passes(writer: MessageQueue, readers: Iterable[MessageQueue], *values: object) -> None:
    """Check that every reader receives these values, in this order."""
    calls = [all_received(reader, len(values)) for reader in readers]
    sent(writer, *values)
    for call in calls:
        assert_same([*values], call.result())


def write(writer: MessageQueue, data: bytes = bytes(8), **given: Any) -> None:
    """Send one chunk."""
    with writer.acquire_write(len(data), **given) as view:
        view[:] = data


def read(reader: MessageQueue, **given: Any) -> bytes:
    """A copy of the next chunk."""
    with reader.acquire_read(**given) as view:
        return bytes(view)


def fill(writer: MessageQueue) -> int:
    """Enqueue 0, 1, 2, ... until there is no room. Returns the number of accepted values."""
    for number in range(10_000):
        outcome = Call(functools.partial(writer.enqueue, number, timeout=0.2)).outcome()
        if isinstance(outcome, TimeoutError):
            return number
        assert outcome is None, outcome
    raise AssertionError("the number of unread messages has no bound")
