"""The ends of a queue: the methods that transports implement, and the way they wait."""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import CancelledError, TimeoutError, UnsupportedError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exclusive_use import ExclusiveUse
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import ExitGuard
from kvplug.transport.queue.handle import QueueHandle

if TYPE_CHECKING:
    from kvplug.transport.queue.endpoint import QueueEndpoint

MAX_CHUNK_BYTES: Final = 24 << 20
MAX_CHUNKS: Final = 10
WARNING_INTERVAL_S: Final = 60.0
_LOOK_AT_CANCEL_S = 0.02  # an event cannot wake a transport's own wait, so it is polled

logger = logging.getLogger(__name__)


class MessageQueue(abc.ABC):
    """One end of a queue: the writer's, or one reader's.

    Law. Each reader named in the handle gets every message once and in order, beginning with the first, no
    matter when it attaches, or an error that says how many messages it lost. Messages are values that
    :mod:`kvplug.net.wire` carries, including CPU tensors and numpy arrays, or chunks of raw bytes. Values are
    copied when they are enqueued: the writer may change them afterwards, and each reader gets its own copy.

    Each message takes a chunk of ``max_chunk_bytes``; larger values are possible. When the slowest reader has
    ``max_chunks`` unread messages, the writer waits, and names the readers it waits for. A reader that ends
    is evicted (:attr:`readers` shows it, and a warning is logged if it died); the others continue. When the
    writer ends, attached readers first get everything that it had enqueued, then ``PeerGoneError``.

    Callers. One thread at a time at each end, else ``BusyError``. Any thread may call ``close`` and
    ``abort``.

    Not promised. That a message has been read when ``enqueue`` returns.
    """

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
            """Return how long to sleep at most before checking again; ``None``: until woken.

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
    def readers(self) -> tuple[QueueHandle.Reader, ...]:
        """All readers of the handle, in its order. Only the writer's end has them.

        Raises:
            UnsupportedError: this is a reader's end.
            ClosedError.
        """

    @abc.abstractmethod
    def export_handle(self) -> QueueHandle:
        """Return the handle for :meth:`QueueEndpoint.create_from_handle`. Works at both ends.

        Raises:
            ClosedError.
        """

    @abc.abstractmethod
    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Wait until the writer and all its readers have called this. Optional, at any time.

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
            UnsupportedError: the next message is a raw chunk, which stays; or this is the writer's end.
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
            UnsupportedError: the next message is a value, which stays; or this is the writer's end.
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
        """End politely: a reader leaves; the readers attached to a writer can still receive everything.

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
