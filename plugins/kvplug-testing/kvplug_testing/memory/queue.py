"""The queue "memory": one list of messages in one process, and each reader's position in it."""

from __future__ import annotations

import abc
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, NamedTuple

import attrs

from kvplug import CapacityError, ClosedError, ConfigError, PeerGoneError, UnsupportedError
from kvplug.net.wire import Limits, decode, encode
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    ExclusiveUse,
    MessageQueue,
    NamedExhaustion,
    QueueContext,
    QueueEndpoint,
    QueueHandle,
    Reader,
    Timeout,
    Wait,
    close_after_fork,
    end_at_exit,
)

logger = logging.getLogger(__name__)

LIMITS: Final = Limits(max_bytes=1 << 40)
"""No value comes from an untrusted process, so its size is limited only by memory."""
_rings: Final[dict[str, Ring]] = {}
_numbers = itertools.count(1)


class QueueMessage(NamedTuple):
    """One message of the list."""

    raw: bool
    data: bytes | bytearray
    """An encoded value, which each reader decodes; or a chunk's bytes."""


class Ring:
    """The state that the ends share. Its methods are called with ``changed`` held."""

    def __init__(self, reader_ranks: Sequence[int], max_chunks: int) -> None:
        self.name = f"memory:{next(_numbers)}"
        self.reader_ranks = tuple(reader_ranks)
        self.max_chunks = max_chunks
        self.changed = threading.Condition()
        self.messages: deque[QueueMessage] = deque()
        self.first = 0  # number of messages[0]
        self.taken = dict.fromkeys(reader_ranks, 0)  # by reader: how many messages it has read
        self.attached: set[int] = set()
        self.ready: set[int | None] = set()  # None is the writer
        self.gone: dict[int, Reader] = {}
        self.writer_gone = ""

    def here(self) -> list[int]:
        """Readers that the writer waits for, attached or not."""
        return [rank for rank in self.reader_ranks if rank not in self.gone]

    def lag(self, rank: int) -> int:
        return self.first + len(self.messages) - self.taken[rank]

    def slow(self) -> list[int]:
        """Readers without room for another message."""
        return [rank for rank in self.here() if self.lag(rank) >= self.max_chunks]

    def unready(self) -> list[int]:
        return [rank for rank in self.here() if rank not in self.ready]

    def put(self, message: QueueMessage) -> None:
        self.messages.append(message)
        self.drop_what_all_have_read()

    def drop_what_all_have_read(self) -> None:
        while self.messages and all(self.taken[rank] > self.first for rank in self.here()):
            self.messages.popleft()
            self.first += 1
        self.changed.notify_all()

    def evict(self, rank: int, why: str, died: bool) -> None:
        if rank not in self.gone:
            self.gone[rank] = attrs.evolve(self.reader(rank), gone=why, died=died)
            level = logging.WARNING if died else logging.DEBUG
            logger.log(level, "evicted from %s: %s", self.name, self.gone[rank])
            self.drop_what_all_have_read()

    def reader(self, rank: int) -> Reader:
        """The reader's current state, or its state when it was evicted."""
        process = f"pid {os.getpid()}" if rank in self.attached else "has not come yet"
        return self.gone.get(rank) or Reader(rank=rank, process=process, lag=self.lag(rank))

    def named(self, ranks: Sequence[int]) -> str:
        return ", ".join(str(self.reader(rank)) for rank in ranks)


class MemoryQueueEndpoint(QueueEndpoint):
    """The factory of the spec."""

    ring = Ring
    in_one_process: ClassVar[bool] = True
    """Tells the conformance kit that its readers cannot be in another process."""

    def create(self, reader_ranks: Sequence[int] | None = None) -> MemoryWriter:
        ring = self.ring(self._reader_ranks(reader_ranks), self.context.max_chunks)
        _rings[ring.name] = ring
        return self.make_writer(ring)

    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> MemoryReader:
        Deadline.after(timeout)  # checks the timeout; there is nothing to wait for
        handle.check("memory", rank)
        ring = _rings.get(handle.data.get("name", ""))
        if ring is None:
            raise PeerGoneError("the writer of this queue is not in this process (any more)")
        with ring.changed:
            if rank in ring.attached:
                raise ConfigError(f"reader rank {rank} has attached to {ring.name} already")
            ring.attached.add(rank)
        return self.make_reader(ring, rank)

    def make_writer(self, ring: Ring) -> MemoryWriter:
        return MemoryWriter(self, ring)

    def make_reader(self, ring: Ring, rank: int) -> MemoryReader:
        return MemoryReader(self, ring, rank)

    def handle_of(self, ring: Ring) -> QueueHandle:
        return QueueHandle(
            transport="memory",
            reader_ranks=ring.reader_ranks,
            local_reader_ranks=self._local_reader_ranks(ring.reader_ranks),
            data={"name": ring.name},
        )


class MemoryQueueEnd(MessageQueue):
    """The common part of both ends."""

    def __init__(self, endpoint: MemoryQueueEndpoint, ring: Ring, rank: int | None) -> None:
        self._endpoint = endpoint
        self._context: QueueContext = endpoint.context
        self._ring = ring
        self._rank = rank
        self._closed = False
        self._turn = ExclusiveUse("at this end of the queue")
        close_after_fork(self)
        end_at_exit(self)

    @property
    def rank(self) -> int | None:
        return self._rank

    @property
    def closed(self) -> bool:
        return self._closed

    def export_handle(self) -> QueueHandle:
        self._check_open()
        return self._endpoint.handle_of(self._ring)

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        ring = self._ring
        with self._turn.taken(), self._locked():
            ring.ready.add(self._rank)
            ring.changed.notify_all()
            self._wait(
                lambda: not ring.unready() and None in ring.ready,
                self.wait("all to be ready", self._who_is_unready, timeout),
            )

    def _who_is_unready(self) -> str:
        writer = "" if None in self._ring.ready else "the writer"
        return ", ".join(filter(None, [writer, self._ring.named(self._ring.unready())]))

    def wait(self, what: str, waits_for: Callable[[], str], timeout: Timeout, **given: Any) -> Wait:
        """One wait, with this queue's defaults."""
        deadline = Deadline.after(timeout, self._context.timeout_s)
        return Wait(what, waits_for, deadline, self._context.warning_interval_s, **given)

    def _wait(self, ready: Callable[[], object], wait: Wait) -> None:
        """Wait until ``ready()``, with the lock held."""
        while not ready():
            self._check_others()
            self._ring.changed.wait(wait.pause())
            self._check_open()

    def _check_others(self) -> None:
        """Raise if the awaited event can no longer happen."""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._check_open()  # before the lock: in a forked child, a thread of the parent may hold it
        with self._ring.changed:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this end of the queue is closed")

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        Deadline.after(timeout)
        self._end("has left", died=False)

    def abort(self) -> None:
        self._end("was aborted", died=True)

    def _end(self, why: str, died: bool) -> None:
        if not self._closed:
            with self._ring.changed:
                self._closed = True
                self._leave(why, died)
                self._ring.changed.notify_all()

    @abc.abstractmethod
    def _leave(self, why: str, died: bool) -> None:
        """Update the ring after this end has ended. Called with the ring's condition held."""

    def _end_at_exit(self) -> None:
        self.abort()

    def _is_in_use(self) -> bool:
        return self._turn.busy

    def _after_fork_in_child(self) -> None:
        self._closed = True
        self._turn = ExclusiveUse("at this end of the queue")


class MemoryWriter(MemoryQueueEnd):
    """The writer's end."""

    def __init__(self, endpoint: MemoryQueueEndpoint, ring: Ring) -> None:
        super().__init__(endpoint, ring, None)

    @property
    def readers(self) -> tuple[Reader, ...]:
        with self._locked():
            return tuple(map(self._ring.reader, self._ring.reader_ranks))

    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        with self._turn.taken():
            self._check_open()
            message = QueueMessage(False, encode(value, limits=LIMITS))
            self._wait_for_room(timeout)
            self._put(message)

    @contextmanager
    def acquire_write(
        self, nbytes: int | None = None, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Iterator[memoryview]:
        size = self._context.max_chunk_bytes
        nbytes = size if nbytes is None else nbytes
        if not 0 <= nbytes <= size:
            raise CapacityError(f"{nbytes} bytes were asked for, and a chunk has {size}")
        with self._turn.taken():
            self._wait_for_room(timeout)
            with NamedExhaustion("making a chunk"):
                chunk = bytearray(nbytes)
            with memoryview(chunk) as view:
                yield view
            self._put(QueueMessage(True, chunk))

    def _wait_for_room(self, timeout: Timeout) -> None:
        ring = self._ring
        with self._locked():
            wait = self.wait("room for a message", lambda: ring.named(ring.slow()), timeout)
            self._wait(lambda: not ring.slow(), wait)
            self._check_others()

    def _check_others(self) -> None:
        ring = self._ring
        if ring.reader_ranks and not ring.here():
            raise PeerGoneError(f"no reader is left: {ring.named(ring.reader_ranks)}")

    def _put(self, message: QueueMessage) -> None:
        with self._locked():
            self._ring.put(message)

    def dequeue(self, *_: Any, **__: Any) -> Any:
        self._check_reader()

    def acquire_read(self, *_: Any, **__: Any) -> Any:
        self._check_reader()

    def _leave(self, why: str, died: bool) -> None:
        self._ring.writer_gone = why
        _rings.pop(self._ring.name, None)

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        _rings.pop(self._ring.name, None)


class MemoryReader(MemoryQueueEnd):
    """One reader's end."""

    _rank: int

    @property
    def readers(self) -> tuple[Reader, ...]:
        self._check_writer()
        return ()

    def dequeue(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Any:
        with self._turn.taken():
            message = self._next(False, timeout, cancel, indefinite)
            value = decode(message.data, limits=LIMITS)
            self._advance()
            return value

    @contextmanager
    def acquire_read(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Iterator[memoryview]:
        with self._turn.taken():
            message = self._next(True, timeout, cancel, indefinite)
            try:
                with memoryview(message.data).toreadonly() as view:
                    yield view
            finally:
                self._advance()

    def _next(
        self, raw: bool, timeout: Timeout, cancel: threading.Event | None, indefinite: bool
    ) -> QueueMessage:
        """Wait for the next message, without removing it."""
        ring = self._ring
        timeout = None if indefinite and timeout is DEFAULT_TIMEOUT else timeout
        with self._locked():
            wait = self.wait("a message", lambda: "the writer", timeout, cancel=cancel, indefinite=indefinite)
            self._wait(lambda: ring.lag(self._rank), wait)
            message = ring.messages[ring.taken[self._rank] - ring.first]
        if message.raw is not raw:
            kinds = ("a value, for dequeue", "a chunk of bytes, for acquire_read")
            raise UnsupportedError(f"the next message is {kinds[message.raw]}")
        return message

    def _check_others(self) -> None:
        if self._ring.writer_gone:
            raise PeerGoneError(f"the writer {self._ring.writer_gone}, and everything of it was received")

    def _advance(self) -> None:
        with self._ring.changed:
            self._ring.taken[self._rank] += 1
            self._ring.drop_what_all_have_read()

    def enqueue(self, *_: Any, **__: Any) -> None:
        self._check_writer()

    def acquire_write(self, *_: Any, **__: Any) -> Any:
        self._check_writer()

    def _leave(self, why: str, died: bool) -> None:
        self._ring.evict(self._rank, why, died)
