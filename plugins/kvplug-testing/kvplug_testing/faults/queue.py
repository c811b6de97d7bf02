"""A message queue's end that wraps any other and injects the faults of a plan into its values."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.net.wire.values import Limits, decode, encode
from kvplug.transport.context import QueueContext
from kvplug.transport.pipe import Pipe, Transfer
from kvplug.transport.queue import MessageQueue, QueueEndpoint, QueueHandle, Reader
from kvplug_testing.faults.messages import copied, flip, flipped, is_tensor, nbytes_of, parts, writable
from kvplug_testing.faults.pipe import FaultyPipe
from kvplug_testing.faults.plan import Plan
from kvplug_testing.faults.schedule import Injection, PlanRecord
from kvplug_testing.faults.transport import planned

_LIMITS: Final = Limits(max_bytes=1 << 40)
"""No limit here: the inner queue has its own."""


class FaultyQueueEndpoint(QueueEndpoint):
    """An endpoint around another one; its queue ends inject faults. The handle is the inner endpoint's.

    The ends are numbered from 1 in the order in which they are made, for rules that name one.
    """

    def __init__(self, inner: QueueEndpoint, plan: Plan) -> None:
        super().__init__(inner.context)
        self._inner = inner
        self._plan = plan
        self._record = PlanRecord(plan)

    def create(self, reader_ranks: Sequence[int] | None = None) -> FaultyQueue:
        return self._wrapped(self._inner.create(reader_ranks))

    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> FaultyQueue:
        return self._wrapped(self._inner.create_from_handle(handle, rank, timeout))

    def _wrapped(self, end: MessageQueue) -> FaultyQueue:
        number, timeout_s = next(self._record.numbers), self.context.timeout_s
        return FaultyQueue(end, self._plan, number=number, timeout_s=timeout_s, record=self._record)


class FaultyQueue(MessageQueue):
    """One end of another queue, with faults: rules of direction "send" at a writer, "recv" at a reader.

    Rules apply to values. Chunks that are written and read in place are not counted, and pass unchanged.
    ``flip`` flips bits of tensors and numpy arrays, also inside lists, tuples and dict values; a value
    without any passes unchanged. A call that a rule delays ignores ``cancel``.
    """

    def __init__(
        self,
        queue: MessageQueue,
        plan: Plan,
        *,
        number: int = 1,
        timeout_s: float = 30.0,
        record: PlanRecord | None = None,
    ) -> None:
        """Wrap ``queue`` with ``plan``.

        Args:
            number: this end's number, for rules that name one.
            timeout_s: how long a rule may delay a call without a timeout.
            record: that of all ends of the plan; by default this end has its own.
        """
        self.queue = queue
        """The inner queue's end."""
        self._values = _Values(queue)
        self._pipe = _FaultyValues(self._values, plan, number=number, timeout_s=timeout_s, record=record)
        self.hits = self._pipe.hits
        """How often each action has happened. A ``flip`` without a bit to flip does not count."""

    @property
    def rank(self) -> int | None:
        return self.queue.rank

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    @property
    def readers(self) -> tuple[Reader, ...]:
        return self.queue.readers

    def export_handle(self) -> QueueHandle:
        return self.queue.export_handle()

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self.queue.wait_until_ready(timeout)

    def enqueue(self, value: Any, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._check_writer()
        self._pipe.send_tensor(value, timeout=timeout)

    def dequeue(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Any:
        self._check_reader()
        self._values.given.cancel, self._values.given.indefinite = cancel, indefinite
        if indefinite and timeout is DEFAULT_TIMEOUT:
            timeout = None
        return self._pipe.recv_tensor(timeout=timeout)

    def acquire_write(
        self, nbytes: int | None = None, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> AbstractContextManager[memoryview]:
        return self.queue.acquire_write(nbytes, timeout)

    def acquire_read(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> AbstractContextManager[memoryview]:
        return self.queue.acquire_read(timeout, cancel, indefinite)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._pipe.close(timeout)

    def abort(self) -> None:
        self._pipe.abort()


def faulty(context: QueueContext) -> QueueEndpoint:
    """The factory of the spec.

    Raises:
        ConfigError: the context has no inner queue.
    """
    return FaultyQueueEndpoint(*planned(context, "queue"))


class _Values(Pipe):
    """An end of a queue as a pipe of values, for :class:`FaultyPipe`, which does not inspect messages."""

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        self.given = threading.local()
        """The other arguments of this thread's ``dequeue``."""

    @property
    def closed(self) -> bool:
        return self._queue.closed

    @property
    def peer(self) -> str:
        return "the readers of the queue" if self._queue.is_writer else "the writer of the queue"

    @property
    def name(self) -> str:
        return "writer's end" if self._queue.is_writer else f"end of reader rank {self._queue.rank}"

    def send_tensor(self, tensor: Any, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        self._queue.enqueue(tensor, timeout)
        transfer = Transfer(0)
        transfer.finish()
        return transfer

    def recv_tensor(self, out: Any = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        return self._queue.dequeue(timeout, self.given.cancel, self.given.indefinite)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._queue.close(timeout)

    def abort(self) -> None:
        self._queue.abort()


class _FaultyValues(FaultyPipe):
    """The operations on messages that are values."""

    pipe: _Values

    @property
    def _name(self) -> str:
        return self.pipe.name

    def _nbytes_of(self, message: Any) -> int:
        return nbytes_of(message) if is_tensor(message) else len(encode(message, limits=_LIMITS))

    def _copied(self, message: Any) -> Any:
        return (
            copied(message) if is_tensor(message) else decode(encode(message, limits=_LIMITS), limits=_LIMITS)
        )

    def _has_bits(self, message: Any) -> bool:
        return any(part.nbytes for part in parts(message))

    def _flipped(self, message: Any, hit: Injection) -> Any:
        bits, chance = hit.rule.bits or 1, hit.random()
        if is_tensor(message):
            return flipped(message, bits, chance)
        copy = self._copied(message)
        flip([writable(part) for part in parts(copy)], bits, chance)
        return copy
