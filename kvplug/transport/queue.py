"""The message queue: one writer, many readers, small values and tensors.

The names (``MessageQueue``, ``export_handle``, ``create_from_handle``, ``create_from_process_group``) follow
the shared-memory broadcast that engines have, without its defects: pickle, silence about slow readers, and
dead readers that block all others. A transport of kind "queue" implements :class:`QueueEndpoint` and the two
ends of :class:`MessageQueue`.
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

from kvplug.config.addresses import DEFAULT_HOST, Address
from kvplug.errors import (
    CancelledError,
    ConfigError,
    KvplugError,
    TimeoutError,
    TransportError,
    UnsupportedError,
    WireError,
)
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exclusive_use import ExclusiveUse
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.peer_text import peer_text
from kvplug.net.threads import ExitGuard
from kvplug.net.trust.credentials import Credentials
from kvplug.net.wire import encode, from_plain, to_plain
from kvplug.transport.group.group import StatelessGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_CHUNK_BYTES: Final = 24 << 20
MAX_CHUNKS: Final = 10
WARNING_INTERVAL_S: Final = 60.0
_LOOK_AT_CANCEL_S = 0.02  # an event cannot wake a transport's own wait, so it is polled
_MOST_WORDS: Final = 4000
"""The most characters of an error that are sent to the other ranks."""

logger = logging.getLogger(__name__)


def _ranks(given: Iterable[int]) -> tuple[int, ...]:
    return tuple(given)


def _unchanging(given: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(given))


class MessageQueue(abc.ABC):
    """One end of a queue: the writer's, or one reader's.

    Law. Each reader named in the handle gets every message once and in order, beginning with the first, no
    matter when it attaches, or an error that says how many messages it lost. Messages are values that
    :mod:`kvplug.net.wire` carries, including CPU tensors and numpy arrays, or chunks of raw bytes. Values are
    copied when they are enqueued: the writer may change them afterwards, and each reader gets its own copy.

    Each message takes a chunk of ``max_chunk_bytes``; larger values are possible. When the slowest reader has
    ``max_chunks`` unread messages, the writer waits, and its warnings name those readers. A reader that ends
    is evicted (:attr:`readers` shows it, and a warning is logged if it died); the others continue. When the
    writer ends, attached readers first get everything that it had enqueued, then ``PeerGoneError``.

    Callers. One thread at a time at each end, else ``BusyError``. Any thread may call ``close`` and
    ``abort``.

    Not promised. That a message has been read when ``enqueue`` returns.
    """

    @attrs.frozen(kw_only=True)
    class ReaderState:
        """The writer's view of one reader."""

        rank: int
        """Its rank among the readers of the handle."""
        process: str
        """``"pid 12"``, with the host if it is another; "has not come yet" before the reader attaches."""
        lag: int
        """How many messages the reader has not received yet."""
        gone: str = ""
        """Why the reader was evicted ("has left", "its process ended"); empty while it is attached or
        expected."""
        died: bool = False
        """Whether the reader was evicted because it died, rather than because it left."""

        def __str__(self) -> str:
            behind = "" if self.gone else f", {self.lag} message{'' if self.lag == 1 else 's'} behind"
            return f"reader rank {self.rank} ({self.process}{f'; {self.gone}' if self.gone else ''}){behind}"

    class Wait:
        """The wait of one blocking call: its deadline, its cancelling event, and the warnings that it logs.

        Transports use it so that all of them wait alike::

            wait = self.Wait("room for a message", lambda: ", ".join(map(str, slow)), deadline, interval_s)
            while not there_is_room():
                condition.wait(wait.pause())
        """

        def __init__(
            self,
            what: str,
            peers: Callable[[], str],
            deadline: Deadline,
            interval_s: float = WARNING_INTERVAL_S,
            *,
            cancel: threading.Event | None = None,
            indefinite: bool = False,
        ) -> None:
            self._what = what
            self._peers = peers
            self._deadline = deadline
            self._cancel = cancel
            self._interval_s = interval_s
            self._began = time.monotonic()
            self._warn_at = float("inf") if indefinite else self._began + interval_s

        def pause(self) -> float | None:
            """Return the most seconds to sleep before checking again; ``None``: sleep until woken.

            Raises:
                CancelledError: the caller's event was set.
                TimeoutError: the deadline has passed; the error names what the call waited for, and the
                    peers.
            """
            if self._cancel is not None and self._cancel.is_set():
                raise CancelledError(f"the wait for {self._what} was cancelled by its caller")
            now = time.monotonic()
            if self._deadline.expired:
                raise TimeoutError(
                    f"waited {now - self._began:.3g} s for {self._what}: {self._peers()}; nothing was done"
                )
            if now >= self._warn_at:
                logger.warning(
                    "still waiting for %s after %.3g s: %s", self._what, now - self._began, self._peers()
                )
                while self._warn_at <= now:
                    self._warn_at += self._interval_s
            moments = [self._warn_at, self._deadline.at]
            if self._cancel is not None:
                moments.append(now + _LOOK_AT_CANCEL_S)
            first = min(moments)
            return None if first == float("inf") else max(0.0, first - now)

    def __init__(self, context: QueueEndpoint.Context, rank: int | None) -> None:
        """``rank`` is the rank of this reader, or ``None`` at the writer's end.

        Call this after setting the attributes that ``abort`` and ``_after_fork_in_child`` use: from now on
        the end is aborted when the program exits, and closed in a forked child.
        """
        self._context = context
        self._rank = rank
        self._use = ExclusiveUse("at this end of the queue")
        close_after_fork(self)
        ExitGuard.register(self)

    def __repr__(self) -> str:
        who = "writer" if self._rank is None else f"reader rank {self._rank}"
        return f"<{type(self).__name__}, {who}{', closed' if self.closed else ''}>"

    @property
    def rank(self) -> int | None:
        """The rank of this reader; ``None`` at the writer's end."""
        return self._rank

    @property
    def is_writer(self) -> bool:
        """Whether this is the writer's end."""
        return self.rank is None

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether ``close`` or ``abort`` was called here."""

    @property
    @abc.abstractmethod
    def readers(self) -> tuple[MessageQueue.ReaderState, ...]:
        """All readers of the handle, in its order. Available only at the writer's end.

        Raises:
            UnsupportedError: this is a reader's end.
            ClosedError.
        """

    @abc.abstractmethod
    def export_handle(self) -> QueueEndpoint.Handle:
        """Return the handle for :meth:`QueueEndpoint.create_from_handle`. Works at both ends.

        Raises:
            ClosedError.
        """

    @abc.abstractmethod
    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Wait until the writer and all its readers have called this. Optional; allowed at any time.

        Raises:
            TimeoutError: not all have called this. At the writer's end the error names the missing readers.
            PeerGoneError, ClosedError, BusyError: as the law says. The writer does not wait for readers that
                died.
        """

    @abc.abstractmethod
    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send one value to every reader.

        Raises:
            TimeoutError: a reader, which the error names, did not make room. Nothing was sent.
            UnsupportedError: queues cannot carry the value, or this is a reader's end.
            CapacityError: the value is too large for the transport.
            PeerGoneError: all readers have ended.
            ClosedError, BusyError: as the law says.
        """

    @abc.abstractmethod
    def dequeue(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Any:
        """Receive the next value.

        Args:
            cancel: The call gives up when this event is set.
            indefinite: Wait without warnings, and without a deadline unless ``timeout`` sets one.

        Raises:
            TimeoutError: no value arrived in time.
            CancelledError: ``cancel`` was set.
            UnsupportedError: the next message is a raw chunk (it stays unread), or this is the writer's end.
            PeerGoneError: the writer has ended, and all its messages were received.
            TransportError: messages were lost; the error says how many.
            ClosedError, BusyError: as the law says.
        """

    @abc.abstractmethod
    def acquire_write(
        self, nbytes: int | None = None, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> AbstractContextManager[memoryview]:
        """Yield a chunk of ``nbytes`` (default: ``max_chunk_bytes``) to be written in place.

        The chunk is sent when the ``with`` block ends. If the block raises, nothing is sent and the chunk is
        free again. After the block the view, and tensors or arrays made over it, are invalid, but nothing
        prevents their use: a write may damage a later message, and since ``torch.frombuffer`` keeps no memory
        alive, an access after :meth:`close` can crash the process.

        Raises:
            CapacityError: ``nbytes`` do not fit into a chunk.
            The rest as :meth:`enqueue`.
        """

    @abc.abstractmethod
    def acquire_read(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> AbstractContextManager[memoryview]:
        """Yield the next chunk, read-only and in place. It counts as read when the ``with`` block ends, even
        by an exception.

        After the block the view, and tensors or arrays made over it, are invalid, but nothing prevents their
        use: they show a later message, and since ``torch.frombuffer`` keeps no memory alive, an access after
        :meth:`close` can crash the process. Copy (``clone``) within the block whatever must survive it.

        Raises:
            UnsupportedError: the next message is a value (it stays unread), or this is the writer's end.
            The rest as :meth:`dequeue`.
        """

    def broadcast_object(self, value: object = None, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        """Send ``value`` at the writer's end, receive it at a reader's end, and return it at both.

        Raises as :meth:`enqueue` and :meth:`dequeue`.
        """
        if self.is_writer:
            self.enqueue(value, timeout)
            return value
        return self.dequeue(timeout)

    @abc.abstractmethod
    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Close gracefully: a reader leaves; the readers attached to a writer can still receive everything.

        Idempotent.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Close at once, as if this process had died. Idempotent, never blocks."""

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(self, kind: object, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    # -- for transports ------------------------------------------------------------------------

    def _taken(self) -> AbstractContextManager[object]:
        """Return a context manager to put around each call that waits, sends or receives.

        Raises:
            BusyError: another thread is inside such a call.
        """
        return self._use.taken()

    def _is_in_use(self) -> bool:
        """Whether a thread is inside a call. By default: whether it is inside :meth:`_taken`."""
        return self._use.busy

    @abc.abstractmethod
    def _after_fork_in_child(self) -> None:
        """In a forked child, mark the end closed, and close the descriptors and memory that no other object
        closes."""

    def _deadline(self, timeout: Timeout) -> Deadline:
        """Return the deadline of a call with this ``timeout``."""
        return Deadline.after(timeout, self._context.timeout_s)

    def _wait(self, what: str, peers: Callable[[], str], deadline: Deadline, **given: Any) -> Wait:
        """Return a :class:`Wait` that warns at the context's interval."""
        return self.Wait(what, peers, deadline, self._context.warning_interval_s, **given)

    def _end_at_exit(self) -> None:
        self.abort()

    def _check_writer(self) -> None:
        if not self.is_writer:
            raise UnsupportedError(f"this is the end of reader rank {self.rank}; only the writer sends")

    def _check_reader(self) -> None:
        if self.is_writer:
            raise UnsupportedError("this is the writer's end; only readers receive")


class QueueEndpoint(abc.ABC):
    """What a message queue's factory returns. It makes the ends of queues. A transport implements
    :meth:`create` and :meth:`create_from_handle`."""

    @attrs.frozen(kw_only=True)
    class Handle:
        """The plain values that a reader needs to attach. Anything that carries values can carry them."""

        transport: str
        """The name of the transport that made the handle. Other transports refuse it."""
        reader_ranks: tuple[int, ...] = attrs.field(converter=_ranks)
        """The ranks that may attach, each once."""
        local_reader_ranks: tuple[int, ...] = attrs.field(converter=_ranks)
        """The ranks that are reached through shared memory."""
        data: Mapping[str, Any] = attrs.field(converter=_unchanging)
        """The transport's own values, such as names, addresses and tokens. Do not log them."""

        def __repr__(self) -> str:
            return f"<QueueEndpoint.Handle {self.transport!r} for readers {_listed(self.reader_ranks)}>"

        def as_plain(self) -> dict[str, Any]:
            """Return the handle as plain values, for :func:`kvplug.net.wire.encode`, JSON or a group."""
            return dict(to_plain(self))

        @classmethod
        def from_plain(cls, plain: Any) -> QueueEndpoint.Handle:
            """Return the handle from which :meth:`as_plain` made ``plain``.

            Raises:
                WireError: a field of the handle is missing or wrong; the error names it.
            """
            return from_plain(plain, cls, "queue handle")

        def check(self, transport: str, rank: int) -> None:
            """Check that reader ``rank`` may attach with the handle. For transports.

            Raises:
                WireError: the handle belongs to another transport.
                ConfigError: ``rank`` is not a reader of the queue.
            """
            if self.transport != transport:
                raise WireError(
                    f"a handle of the queue {self.transport!r} was given to the queue {transport!r}"
                )
            if rank not in self.reader_ranks:
                raise ConfigError(
                    f"rank {rank} is not a reader of this queue; its readers are {_listed(self.reader_ranks)}"
                )

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a message queue, which returns a ``QueueEndpoint``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        credentials: Credentials
        """The endpoint's listeners and connections prove themselves with these."""
        host: str = DEFAULT_HOST
        """The interface on which the endpoint may listen for readers that shared memory does not reach. A
        Unix socket needs no interface."""
        n_reader: int = attrs.field(default=1, validator=attrs.validators.ge(0))
        """How many readers a queue has if ``create`` does not name them."""
        local_reader_ranks: tuple[int, ...] | None = attrs.field(
            default=None, converter=attrs.converters.optional(tuple)
        )
        """Readers to reach through shared memory; ``None``: all readers that shared memory can reach."""
        max_chunk_bytes: int = attrs.field(default=MAX_CHUNK_BYTES, validator=attrs.validators.ge(1))
        """Size of one slot for a message. Larger messages are possible, but cost more."""
        max_chunks: int = attrs.field(default=MAX_CHUNKS, validator=attrs.validators.ge(1))
        """How many unread messages the slowest reader may have."""
        timeout_s: float = 30.0
        """The default timeout of a call, in seconds."""
        warning_interval_s: float = attrs.field(default=WARNING_INTERVAL_S, validator=attrs.validators.gt(0))
        """A call that waits logs the peers it waits for at this interval, in seconds."""
        heartbeat_timeout_s: float = 10.0
        """Seconds of silence after which an end on another host counts as dead."""

    def __init__(self, context: QueueEndpoint.Context) -> None:
        self.context = context
        """The context that the factory received."""

    @abc.abstractmethod
    def create(self, reader_ranks: Sequence[int] | None = None) -> MessageQueue:
        """Make a new queue and return the writer's end.

        ``reader_ranks`` names the readers. By default they are 0 to ``n_reader - 1``, with the context's
        ``n_reader``. Does not wait for readers.

        Raises:
            ConfigError: a rank appears twice.
            TransportError, AddressInUseError, InsecureAddressError: the queue cannot be made.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for the queue.
        """

    @abc.abstractmethod
    def create_from_handle(
        self, handle: QueueEndpoint.Handle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> MessageQueue:
        """Attach reader ``rank`` and return its end. Each rank attaches once: a second reader would miss
        messages.

        Raises:
            WireError: the handle belongs to another transport.
            ConfigError: ``rank`` is not a reader of that queue, or has attached already.
            PeerGoneError: the writer is gone.
            TimeoutError: the writer did not answer.
            AuthenticationError: one end did not prove itself to the other.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for the end.
        """

    @NamedExhaustion("making a message queue with the ranks of a group")
    def create_from_process_group(
        self,
        group: StatelessGroup | ProcessGroup,
        writer_rank: int = 0,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> MessageQueue:
        """Make a queue from ``writer_rank`` to all other ranks of a group, and return this rank's end.

        All ranks call this. It returns when the queue is ready at all of them, and makes the queue either at
        all of them or at none. ``group`` is a group of kvplug or of torch, and ``writer_rank`` a rank in that
        group. A torch process group needs CPU tensors (gloo), which carry the address of a kvplug group of
        the same ranks: a Unix socket, or the context's host if there is a secret or TLS. The collectives of
        the process group wait as long as its own timeout allows.

        Raises:
            TransportError: a rank could not make its end. All ranks raise this error, which names the rank
                and the reason. Or a collective of a torch process group failed.
            TimeoutError, PeerGoneError: a rank, which the error names, did not call this or is gone.
            ClosedError, BusyError: as the law of a kvplug group says.
            ConfigError: the group has no rank ``writer_rank``.
            UnsupportedError: ``group`` is neither kind of group, or a process group without CPU tensors.
            ResourceExhaustedError: this process has no free descriptor, thread or memory for its end.
        """
        deadline = Deadline.after(timeout, self.context.timeout_s)
        if isinstance(group, StatelessGroup):
            return self._create_in(group, writer_rank, deadline)
        host, credentials = self.context.host, self.context.credentials
        proves = credentials.secret is not None or credentials.tls is not None
        address = str(Address(host)) if proves and not host.startswith("unix:") else "unix:"
        with StatelessGroup.from_process_group(
            group,
            address,
            credentials=credentials,
            timeout=deadline.remaining(),
            timeout_s=self.context.timeout_s,
        ) as ranks:
            return self._create_in(ranks, writer_rank, deadline)

    def _create_in(self, group: StatelessGroup, writer_rank: int, deadline: Deadline) -> MessageQueue:
        is_writer = group.rank == writer_rank
        queue: MessageQueue | None = None
        error: Exception | None = None
        plain: Any = None
        try:
            try:
                if is_writer:
                    queue = self.create([rank for rank in range(group.world_size) if rank != writer_rank])
                    plain = queue.export_handle().as_plain()
                    encode(plain)  # a handle that cannot be encoded is a fault of this rank
            except Exception as e:
                error, plain = e, None
            plain = group.broadcast(plain, writer_rank, deadline.remaining())
            try:
                if plain is not None and not is_writer:
                    handle = QueueEndpoint.Handle.from_plain(plain)
                    queue = self.create_from_handle(handle, group.rank, deadline.remaining())
            except Exception as e:
                error = e
            made = _agreed(group, queue, error, deadline)
            made.wait_until_ready(deadline.remaining())
        except BaseException:
            if queue is not None:
                queue.abort()
            raise
        return made

    def _reader_ranks(self, given: Sequence[int] | None) -> tuple[int, ...]:
        """Check and return the reader ranks that :meth:`create` was given. For transports."""
        ranks = tuple(range(self.context.n_reader)) if given is None else tuple(given)
        if len(set(ranks)) != len(ranks) or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ConfigError(f"reader_ranks must be whole numbers, each once; got {_listed(ranks)}")
        return ranks

    def _local_reader_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of ``ranks`` that the context allows to be reached through shared memory. For
        transports."""
        local = self.context.local_reader_ranks
        return tuple(rank for rank in ranks if local is None or rank in local)


def _agreed(
    group: StatelessGroup, queue: MessageQueue | None, error: Exception | None, deadline: Deadline
) -> MessageQueue:
    """Return ``queue`` if every rank has made its end. Raises as ``create_from_process_group``."""
    why = "" if error is None else f"{type(error).__name__}: {error}"[:_MOST_WORDS]
    try:
        faults = group.all_gather(why, deadline.remaining())
    except KvplugError:
        if error is None:
            raise
        faults = [why if rank == group.rank else "" for rank in range(group.world_size)]
    failed = [
        f"rank {rank} cannot make its end of the queue: {peer_text(fault, 2 * _MOST_WORDS)}"
        for rank, fault in enumerate(faults)
        if fault != ""
    ]
    if failed or queue is None:
        raise TransportError("; ".join(failed)) from error
    return queue


def _listed(ranks: Iterable[int]) -> str:
    """Format ranks for messages."""
    return ", ".join(map(str, ranks)) or "none"
