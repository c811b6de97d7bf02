"""The message queue: one writer, many readers, small values and tensors.

The names are those of the family's shared-memory broadcast (``MessageQueue``, ``export_handle``,
``create_from_handle``, ``create_from_process_group``); its defects (pickle, silence about who is slow, a dead
reader that blocks everybody) are not. A transport of kind "queue" implements :class:`QueueEndpoint` and the
two ends of :class:`MessageQueue`.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.errors import (
    CancelledError,
    ConfigError,
    TimeoutError,
    TransportError,
    UnsupportedError,
    WireError,
)

if TYPE_CHECKING:
    from kvplug.context import QueueContext
    from kvplug.group.group import StatelessGroup

logger = logging.getLogger(__name__)

MAX_CHUNK_BYTES: Final = 24 << 20
MAX_CHUNKS: Final = 10
WARNING_INTERVAL_S: Final = 60.0
_LOOK_AT_CANCEL_S = 0.02  # an event cannot wake a transport's own wait, so it is looked at


def _ranks(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


def _unchanging(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(value))


@attrs.frozen(kw_only=True)
class QueueHandle:
    """What a reader needs to attach: plain values, to be carried by whatever carries values."""

    transport: str
    """Name of the queue that made it; another one refuses it."""
    reader_ranks: tuple[int, ...] = attrs.field(converter=_ranks)
    """Who may attach, each once."""
    local_reader_ranks: tuple[int, ...] = attrs.field(converter=_ranks)
    """Those that are to be reached through memory."""
    data: Mapping[str, Any] = attrs.field(converter=_unchanging)
    """The transport's own: names, addresses, tokens. Do not log it."""

    def __repr__(self) -> str:
        return f"<QueueHandle of a queue {self.transport!r} for readers {_listed(self.reader_ranks)}>"

    def as_plain(self) -> dict[str, Any]:
        """For :func:`kvplug.wire.encode`, JSON, a group."""
        return {
            "transport": self.transport,
            "reader_ranks": list(self.reader_ranks),
            "local_reader_ranks": list(self.local_reader_ranks),
            "data": dict(self.data),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> QueueHandle:
        """The inverse of :meth:`as_plain`.

        Raises:
            WireError: it is no handle.
        """
        match plain:
            case {
                "transport": str(transport),
                "reader_ranks": [*readers],
                "local_reader_ranks": [*local],
                "data": dict(data),
            } if all(type(rank) is int for rank in (*readers, *local)):
                return cls(transport=transport, reader_ranks=readers, local_reader_ranks=local, data=data)
        raise WireError("this is no handle of a message queue")

    def check(self, transport: str, rank: int) -> None:
        """For transports, before they attach.

        Raises:
            WireError: it is another transport's.
            ConfigError: ``rank`` is not one of its readers.
        """
        if self.transport != transport:
            raise WireError(f"a handle of the queue {self.transport!r} was given to the queue {transport!r}")
        if rank not in self.reader_ranks:
            raise ConfigError(
                f"rank {rank} is no reader of this queue; its readers are {_listed(self.reader_ranks)}"
            )


@attrs.frozen(kw_only=True)
class Reader:
    """One reader, as the writer sees it."""

    rank: int
    process: str
    """``"pid 12"``, with the host where it is another one; "has not come yet" before it has attached."""
    lag: int
    """Messages that it has not taken yet."""
    gone: str = ""
    """Why it was evicted ("has left", "its process ended"); empty while it takes part."""
    died: bool = False
    """Whether it was evicted because it died, and not because it left."""

    def __str__(self) -> str:
        behind = "" if self.gone else f", {self.lag} message{'' if self.lag == 1 else 's'} behind"
        return f"reader rank {self.rank} ({self.process}{f'; {self.gone}' if self.gone else ''}){behind}"


class Wait:
    """One blocking call of a queue's end: its deadline, its cancelling event, and the warnings it logs.

    For transports, so that all of them wait alike::

        wait = Wait("room for a message", lambda: ", ".join(map(str, slow)), deadline, interval_s)
        while not there_is_room():
            condition.wait(wait.pause())
    """

    def __init__(
        self,
        what: str,
        whom: Callable[[], str],
        deadline: Deadline,
        interval_s: float = WARNING_INTERVAL_S,
        *,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> None:
        self._what = what
        self._whom = whom
        self._deadline = deadline
        self._cancel = cancel
        self._interval_s = interval_s
        self._began = time.monotonic()
        self._warn_at = float("inf") if indefinite else self._began + interval_s

    def pause(self) -> float | None:
        """How long to sleep at most before looking again; ``None``: until woken.

        Raises:
            CancelledError: the caller's event was set.
            TimeoutError: the deadline has passed; names what and whom was waited for.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise CancelledError(f"the wait for {self._what} was cancelled by its caller")
        now = time.monotonic()
        if self._deadline.expired:
            raise TimeoutError(
                f"waited {now - self._began:.3g} s for {self._what}: {self._whom()}; nothing has changed"
            )
        if now >= self._warn_at:
            logger.warning(
                "still waiting for %s after %.3g s: %s", self._what, now - self._began, self._whom()
            )
            while self._warn_at <= now:
                self._warn_at += self._interval_s
        moments = [self._warn_at, self._deadline.at]
        if self._cancel is not None:
            moments.append(now + _LOOK_AT_CANCEL_S)
        first = min(moments)
        return None if first == float("inf") else max(0.0, first - now)


class MessageQueue(abc.ABC):
    """One end of a queue: the writer's, or one reader's.

    Law. Each reader named in the handle gets each message once, in order, from the first one on, whenever it
    attaches, or an error that says how many it lost. Messages are values of the kinds that :mod:`kvplug.wire`
    carries, CPU tensors and numpy arrays among them, or chunks of raw bytes. What is enqueued is copied: the
    writer may change it afterwards, and each reader has its own.

    ``max_chunks`` messages may lie unread by the slowest reader, each in a chunk of ``max_chunk_bytes``; then
    the writer waits, and names whom it waits for. A value larger than a chunk passes too. A reader that ends
    is evicted (:attr:`readers` says so, and a warning is logged if it died); the others go on. When the
    writer ends, readers that have attached first get everything that it had enqueued, then ``PeerGoneError``.

    Callers. One thread at a time at each end, else ``BusyError``; ``close`` and ``abort`` from any thread.

    Not promised. That a message was read when ``enqueue`` returns.
    """

    @property
    @abc.abstractmethod
    def rank(self) -> int | None:
        """Of this reader; ``None`` at the writer's end."""

    @property
    def is_writer(self) -> bool:
        return self.rank is None

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether ``close`` or ``abort`` was called here."""

    @property
    @abc.abstractmethod
    def readers(self) -> tuple[Reader, ...]:
        """Everyone named in the handle, in its order. Only the writer's end knows.

        Raises:
            UnsupportedError: this is a reader's end.
            ClosedError.
        """

    @abc.abstractmethod
    def export_handle(self) -> QueueHandle:
        """What :meth:`QueueEndpoint.create_from_handle` takes. At both ends.

        Raises:
            ClosedError.
        """

    @abc.abstractmethod
    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Return when the writer and all its readers have called this. May be left out, and may come late.

        Raises:
            TimeoutError: at the writer's end it names the readers that have not.
            PeerGoneError, ClosedError, BusyError: as the law says. A reader that died is not waited for.
        """

    @abc.abstractmethod
    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send one value to every reader.

        Raises:
            TimeoutError: a reader did not make room; names it. Nothing was sent.
            UnsupportedError: the value is not carried, or this is a reader's end.
            CapacityError: the value is beyond what the transport carries at all.
            PeerGoneError: there were readers, and none is left.
            ClosedError, BusyError: as the law says.
        """

    @abc.abstractmethod
    def dequeue(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Any:
        """The next value.

        Args:
            cancel: the call gives up when it is set.
            indefinite: a long wait is nothing unusual: without end unless ``timeout`` says otherwise, and
                without warnings.

        Raises:
            TimeoutError: none came.
            CancelledError: ``cancel`` was set.
            UnsupportedError: the next message is a raw chunk, which stays; or this is the writer's end.
            PeerGoneError: the writer has ended, and everything of it was received.
            TransportError: messages were lost; says how many.
            ClosedError, BusyError: as the law says.
        """

    @abc.abstractmethod
    def acquire_write(
        self, nbytes: int | None = None, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> AbstractContextManager[memoryview]:
        """A chunk of ``nbytes`` (all of ``max_chunk_bytes`` where nothing is said) to be written in place.

        It is sent when the block ends. If the block raises, nothing is sent and the chunk is free again.
        The view is not valid after it. Whatever :meth:`enqueue` raises comes from here as well.

        Raises:
            CapacityError: ``nbytes`` do not fit a chunk.
        """

    @abc.abstractmethod
    def acquire_read(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> AbstractContextManager[memoryview]:
        """The next chunk, read-only and in place. It has been read when the block ends, by an exception too.

        Whatever else :meth:`dequeue` raises comes from here as well.

        Raises:
            UnsupportedError: the next message is a value, which stays; or this is the writer's end.
        """

    def broadcast_object(self, value: object = None, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        """The same call at every end: the writer's value, which it sends and the readers receive.

        Raises what :meth:`enqueue` and :meth:`dequeue` do.
        """
        if self.is_writer:
            self.enqueue(value, timeout)
            return value
        return self.dequeue(timeout)

    @abc.abstractmethod
    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """End politely: a reader has left; a writer's readers that have attached can still get everything.

        Idempotent.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """End at once, as if this process had died. Idempotent, never blocks."""

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(self, kind: object, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    # -- for transports ------------------------------------------------------------------------

    def _check_writer(self) -> None:
        if not self.is_writer:
            raise UnsupportedError(f"this is the end of reader rank {self.rank}; only the writer sends")

    def _check_reader(self) -> None:
        if self.is_writer:
            raise UnsupportedError("this is the writer's end; only readers receive")


class QueueEndpoint(abc.ABC):
    """What a message queue's factory returns. It makes ends; a transport implements the first two verbs."""

    def __init__(self, context: QueueContext) -> None:
        self.context = context

    @abc.abstractmethod
    def create(self, reader_ranks: Sequence[int] | None = None) -> MessageQueue:
        """The writer's end of a new queue.

        ``reader_ranks`` names its readers; where nothing is said they are 0 up to the context's ``n_reader``.
        Does not wait for anybody.

        Raises:
            ConfigError: a rank comes twice.
            CapacityError, TransportError, AddressInUseError, InsecureAddressError: it cannot be made.
        """

    @abc.abstractmethod
    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> MessageQueue:
        """The end of reader ``rank``. A rank attaches once: who comes later would miss messages.

        Raises:
            WireError: the handle is another transport's.
            ConfigError: ``rank`` is no reader of that queue, or has attached already.
            PeerGoneError: the writer is gone.
            TimeoutError: the writer did not answer.
            AuthenticationError: one end did not prove itself to the other.
        """

    def create_from_process_group(
        self, group: StatelessGroup, writer_rank: int = 0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> MessageQueue:
        """This rank's end of a queue from ``writer_rank`` to all other ranks of a kvplug group.

        All ranks call it; it returns when the queue is ready at all of them.

        Raises:
            TransportError: the writer could not make the queue, and why.
            TimeoutError, PeerGoneError: a rank did not come, or is gone; names it.
        """
        deadline = Deadline.after(timeout, self.context.timeout_s)
        if group.rank == writer_rank:
            try:
                queue = self.create([rank for rank in range(group.world_size) if rank != writer_rank])
                told = ("handle", queue.export_handle().as_plain())
            except Exception as e:
                group.broadcast(("failed", f"rank {writer_rank} cannot make the queue: {e}"), writer_rank)
                raise
            try:
                group.broadcast(told, writer_rank, deadline.remaining())
            except BaseException:
                queue.abort()
                raise
        else:
            what, plain = group.broadcast(None, writer_rank, deadline.remaining())
            if what != "handle":
                raise TransportError(plain)
            queue = self.create_from_handle(QueueHandle.from_plain(plain), group.rank, deadline.remaining())
        try:
            queue.wait_until_ready(deadline.remaining())
        except BaseException:
            queue.abort()
            raise
        return queue

    def _reader_ranks(self, given: Sequence[int] | None) -> tuple[int, ...]:
        """For transports: whom :meth:`create` is to serve."""
        ranks = tuple(range(self.context.n_reader)) if given is None else tuple(given)
        if len(set(ranks)) != len(ranks) or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ConfigError(f"reader ranks are whole numbers, each once; given were {_listed(ranks)}")
        return ranks

    def _local_reader_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """For transports: those of ``ranks`` that the context does not place on other hosts."""
        local = self.context.local_reader_ranks
        return tuple(rank for rank in ranks if local is None or rank in local)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
