"""The ends of a queue: what transports implement, and how they wait."""

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
_LOOK_AT_CANCEL_S = 0.02  # an event cannot wake a transport's own wait, so it is looked at

logger = logging.getLogger(__name__)


class MessageQueue(abc.ABC):
    """One end of a queue: the writer's, or one reader's.

    Law. Each reader named in the handle gets each message once, in order, from the first one on, whenever it
    attaches, or an error that says how many it lost. Messages are values of the kinds that
    :mod:`kvplug.net.wire` carries, CPU tensors and numpy arrays among them, or chunks of raw bytes. What is
    enqueued is copied: the writer may change it afterwards, and each reader has its own.

    At most ``max_chunks`` messages may be unread by the slowest reader, each in a chunk of
    ``max_chunk_bytes``; then the writer waits, and names the readers it waits for. A value larger than a
    chunk is possible. A reader that ends is evicted (:attr:`readers` shows it, and a warning is logged if it
    died); the others continue. When the writer ends, attached readers first get everything that it had
    enqueued, then ``PeerGoneError``.

    Callers. One thread at a time at each end, else ``BusyError``; ``close`` and ``abort`` from any thread.

    Not promised. That a message was read when ``enqueue`` returns.
    """

    class Wait:
        """One blocking call of a queue's end: its deadline, its cancelling event, and the warnings it logs.

        For transports, so that all of them wait alike::

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
            """How long to sleep at most before looking again; ``None``: until woken.

            Raises:
                CancelledError: the caller's event was set.
                TimeoutError: the deadline has passed; names what the call waited for, and which peers.
            """
            if self._cancel is not None and self._cancel.is_set():
                raise CancelledError(f"the wait for {self._what} was cancelled by its caller")
            now = time.monotonic()
            if self._deadline.expired:
                raise TimeoutError(
                    f"waited {now - self._began:.3g} s for {self._what}: {self._peers()}; nothing has changed"
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
        """``rank``: of this reader; ``None``: this is the writer's end.

        From here on the end is aborted when the program leaves, and closed in a forked child: what these need
        is set before.
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
        """All readers of the handle, in its order. At the writer's end only.

        Raises:
            UnsupportedError: this is a reader's end.
            ClosedError.
        """

    @abc.abstractmethod
    def export_handle(self) -> QueueHandle:
        """The argument of :meth:`QueueEndpoint.create_from_handle`. At both ends.

        Raises:
            ClosedError.
        """

    @abc.abstractmethod
    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Return when the writer and all its readers have called this. Optional, at any time.

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
            indefinite: wait without a deadline, unless ``timeout`` sets one, and without warnings.

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
        """A chunk of ``nbytes`` (default: ``max_chunk_bytes``) to be written in place.

        It is sent when the block ends. If the block raises, nothing is sent and the chunk is free again.
        The view is not valid after it. Nor is a tensor or an array made over it, and nothing stops its use:
        what is written there later may damage a message, and ``torch.frombuffer`` keeps no memory alive, so
        that a touch after :meth:`close` can end the process. Whatever :meth:`enqueue` raises comes from here
        as well.

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

        The view is not valid after it. Nor is a tensor or an array made over it, and nothing stops its use:
        it shows a later message, and ``torch.frombuffer`` keeps no memory alive, so that a look after
        :meth:`close` can end the process. Copy what is to stay (``clone``) within the block.

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
        """End politely: a reader leaves; a writer's attached readers can still receive everything.

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
        """For a ``with`` statement around each call that waits, sends or receives.

        Raises:
            BusyError: another thread is inside one.
        """
        return self._use.taken()

    def _is_in_use(self) -> bool:
        """Whether a thread is inside a call: inside :meth:`_taken`, unless the transport knows otherwise."""
        return self._use.busy

    @abc.abstractmethod
    def _after_fork_in_child(self) -> None:
        """In a forked child: mark it closed, and close descriptors and memory that no other object closes."""

    def _deadline(self, timeout: Timeout) -> Deadline:
        """The deadline of a call with this ``timeout``."""
        return Deadline.after(timeout, self._context.timeout_s)

    def _wait(self, what: str, peers: Callable[[], str], deadline: Deadline, **given: Any) -> Wait:
        """A :class:`Wait` that warns as often as the context says."""
        return self.Wait(what, peers, deadline, self._context.warning_interval_s, **given)

    def _end_at_exit(self) -> None:
        self.abort()

    def _check_writer(self) -> None:
        if not self.is_writer:
            raise UnsupportedError(f"this is the end of reader rank {self.rank}; only the writer sends")

    def _check_reader(self) -> None:
        if self.is_writer:
            raise UnsupportedError("this is the writer's end; only readers receive")
