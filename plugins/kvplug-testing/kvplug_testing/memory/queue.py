"""The queue "memory": a list of unread messages for each reader, in one process."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any, Final

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
QueueMessage = bytes | bytearray
"""An encoded value (bytes), which each reader decodes; or a chunk (a bytearray)."""
Ask = Callable[[], Any]


class Ring:
    """The state that the ends share. Its methods are called with ``changed`` held."""

    def __init__(self, handle: QueueHandle, max_chunks: int) -> None:
        self.handle = handle
        self.max_chunks = max_chunks
        self.changed = threading.Condition()
        self.unread: dict[int, deque[QueueMessage]] = {rank: deque() for rank in handle.reader_ranks}
        self.attached: set[int] = set()
        self.ready: set[int | None] = set()  # None is the writer
        self.gone: dict[int, Reader] = {}
        self.writer_gone = ""

    def here(self) -> list[int]:
        """Readers that the writer waits for, attached or not."""
        return [rank for rank in self.unread if rank not in self.gone]

    def slow(self) -> list[int]:
        """Readers without room for another message."""
        return [rank for rank in self.here() if len(self.unread[rank]) >= self.max_chunks]

    def unready(self) -> str:
        """Names the ends that are not ready."""
        writer = "" if None in self.ready else "the writer"
        late = self.named(rank for rank in self.here() if rank not in self.ready)
        return ", ".join(filter(None, [writer, late]))

    def put(self, message: QueueMessage) -> None:
        for rank in self.here():
            self.unread[rank].append(message)
        self.changed.notify_all()

    def evict(self, rank: int, why: str, *, died: bool) -> None:
        self.gone[rank] = attrs.evolve(self.reader(rank), gone=why, died=died)
        self.unread[rank] = deque()
        level = logging.WARNING if died else logging.DEBUG
        logger.log(level, "evicted from %s: %s", self.handle.data["name"], self.gone[rank])

    def reader(self, rank: int) -> Reader:
        """The reader's current state, or its state when it was evicted."""
        process = f"pid {os.getpid()}" if rank in self.attached else "has not come yet"
        return self.gone.get(rank) or Reader(rank=rank, process=process, lag=len(self.unread[rank]))

    def named(self, ranks: Iterable[int]) -> str:
        return ", ".join(str(self.reader(rank)) for rank in ranks)


class MemoryQueue(MessageQueue):
    """One end: a reader's, or, without a rank, the writer's."""

    def __init__(self, context: QueueContext, ring: Ring, rank: int | None) -> None:
        self._context = context
        self._ring = ring
        self._rank = rank
        self._unread = ring.unread[rank] if rank is not None else deque[QueueMessage]()
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

    @property
    def readers(self) -> tuple[Reader, ...]:
        self._check_writer()
        with self._locked():
            return tuple(map(self._ring.reader, self._ring.unread))

    def export_handle(self) -> QueueHandle:
        self._check_open()
        return self._ring.handle

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        ring = self._ring
        with self._turn.taken(), self._locked():
            ring.ready.add(self._rank)
            ring.changed.notify_all()
            self._wait(lambda: not ring.unready(), "all to be ready", ring.unready, timeout)

    def _wait(self, ready: Ask, what: str, waits_for: Ask, timeout: Timeout, **given: Any) -> None:
        """Wait until ``ready()``, with the lock held."""
        deadline = Deadline.after(timeout, self._context.timeout_s)
        wait = Wait(what, waits_for, deadline, self._context.warning_interval_s, **given)
        while not ready():
            self._check_others()
            self._ring.changed.wait(wait.pause())
            self._check_open()

    def _check_others(self) -> None:
        """Raise if the awaited event can no longer happen."""
        ring = self._ring
        if self.is_writer and ring.unread and not ring.here():
            raise PeerGoneError(f"no reader is left: {ring.named(ring.unread)}")
        if not self.is_writer and ring.writer_gone:
            raise PeerGoneError(f"the writer {ring.writer_gone}, and everything of it was received")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._check_open()  # before the lock: in a forked child, a thread of the parent may hold it
        with self._ring.changed:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this end of the queue is closed")

    # -- the writer's calls --------------------------------------------------------------------

    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._check_writer()
        with self._turn.taken():
            self._check_open()
            message = encode(value, limits=LIMITS)
            self._wait_for_room(timeout)
            self._put(message)

    @contextmanager
    def acquire_write(self, nbytes: Any = None, timeout: Timeout = DEFAULT_TIMEOUT) -> Iterator[memoryview]:
        self._check_writer()
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
            self._put(chunk)

    def _wait_for_room(self, timeout: Timeout) -> None:
        ring = self._ring
        with self._locked():
            slow = lambda: ring.named(ring.slow())  # noqa: E731
            self._wait(lambda: not ring.slow(), "room for a message", slow, timeout)
            self._check_others()

    def _put(self, message: QueueMessage) -> None:
        with self._locked():
            self._ring.put(message)

    # -- a reader's calls ----------------------------------------------------------------------

    def dequeue(
        self, timeout: Timeout = DEFAULT_TIMEOUT, cancel: Event | None = None, indefinite: bool = False
    ) -> Any:
        self._check_reader()
        with self._turn.taken():
            data = self._next(bytes, timeout, cancel=cancel, indefinite=indefinite)
            value = decode(data, limits=LIMITS)
            self._advance()
            return value

    @contextmanager
    def acquire_read(
        self, timeout: Timeout = DEFAULT_TIMEOUT, cancel: Event | None = None, indefinite: bool = False
    ) -> Iterator[memoryview]:
        self._check_reader()
        with self._turn.taken():
            chunk = self._next(bytearray, timeout, cancel=cancel, indefinite=indefinite)
            try:
                with memoryview(chunk).toreadonly() as view:
                    yield view
            finally:
                self._advance()

    def _next(self, kind: type, timeout: Timeout, **given: Any) -> QueueMessage:
        """Wait for the next message, without removing it."""
        if given["indefinite"] and timeout is DEFAULT_TIMEOUT:
            timeout = None
        with self._locked():
            self._wait(lambda: self._unread, "a message", lambda: "the writer", timeout, **given)
            message = self._unread[0]
        if type(message) is not kind:
            kinds = {bytes: "a value, for dequeue", bytearray: "a chunk of bytes, for acquire_read"}
            raise UnsupportedError(f"the next message is {kinds[type(message)]}")
        return message

    def _advance(self) -> None:
        """The next message was received."""
        with self._ring.changed:
            self._unread.popleft()
            self._ring.changed.notify_all()

    # -- the end -------------------------------------------------------------------------------

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        Deadline.after(timeout)
        self._end("has left", died=False)

    def abort(self) -> None:
        self._end("was aborted", died=True)

    def _end(self, why: str, *, died: bool) -> None:
        if not self._closed:
            with self._ring.changed:
                self._closed = True
                self._leave(why, died=died)
                self._ring.changed.notify_all()

    def _leave(self, why: str, *, died: bool) -> None:
        """Tell the ring that this end has ended. Called with its condition held."""
        if self._rank is not None:
            self._ring.evict(self._rank, why, died=died)
        else:
            self._ring.writer_gone = why
            _rings.pop(self._ring.handle.data["name"], None)

    def _end_at_exit(self) -> None:
        self.abort()

    def _is_in_use(self) -> bool:
        return self._turn.busy

    def _after_fork_in_child(self) -> None:
        self._closed = True
        self._turn = ExclusiveUse("at this end of the queue")


class MemoryQueueEndpoint(QueueEndpoint):
    """The factory of the spec."""

    ring = Ring
    writer = reader = MemoryQueue

    def create(self, reader_ranks: Sequence[int] | None = None) -> MemoryQueue:
        ranks, name = self._reader_ranks(reader_ranks), f"memory:{next(_numbers)}"
        handle = QueueHandle(
            transport="memory",
            reader_ranks=ranks,
            local_reader_ranks=self._local_reader_ranks(ranks),
            data={"name": name},
        )
        _rings[name] = self.ring(handle, self.context.max_chunks)
        return self.writer(self.context, _rings[name], None)

    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> MemoryQueue:
        Deadline.after(timeout)  # checks the timeout; there is nothing to wait for
        handle.check("memory", rank)
        ring = _rings.get(handle.data.get("name", ""))
        if ring is None:
            raise PeerGoneError("the writer of this queue is not in this process (any more)")
        with ring.changed:
            if rank in ring.attached:
                raise ConfigError(f"reader rank {rank} has attached to this queue already")
            ring.attached.add(rank)
        return self.reader(self.context, ring, rank)
