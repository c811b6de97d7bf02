"""A pipe between two processes: the checks of its calls, the window of its sender, and how it ends."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs

from kvplug.errors import ClosedError, KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exclusive_use import ExclusiveUse
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import ExitGuard
from kvplug.transport.block_views import BlockViews
from kvplug.transport.duplex.partial import MessageLimit
from kvplug.transport.pipe import Blocks, Pipe, Transfer
from kvplug.transport.pipe.blocks import nbytes_of_blocks

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Lifecycle:
    """Whether a pipe, for example, has ended, and why. The first reason is kept, but closing here replaces
    it.

    A forked child finds it closed.

    >>> pipe = Lifecycle("the pipe to pid 7")
    >>> pipe.lose_peer("it was killed"), pipe.lose_peer("it hung up")
    (True, False)
    >>> pipe.error()
    PeerGoneError('the pipe to pid 7: it was killed')
    """

    CLOSED_BY_PEER = "the peer closed it"
    """The reason of :meth:`lose_peer` where the peer has said so, and all that it sent was received."""

    def __init__(self, what: str) -> None:
        """``what`` names it in errors: "the pipe to pid 7"."""
        self._what = what
        self._lock = threading.Lock()
        self._error: type[KvplugError] = KvplugError
        self._reason = ""
        self._closed = ""
        close_after_fork(self)

    @property
    def closed(self) -> bool:
        """Whether it was closed here, or this is a forked child."""
        return bool(self._closed)

    @property
    def ended(self) -> bool:
        """Whether it ended in any way."""
        return bool(self._closed or self._reason)

    @property
    def peer_lost(self) -> bool:
        """Whether the peer ended it."""
        return self._error is PeerGoneError

    @property
    def broken(self) -> bool:
        """Whether the stream's position is lost: even messages that have arrived cannot be received."""
        return self._error is TransportError

    @property
    def state(self) -> str:
        """One of open, closed (here) and ended, for a ``repr``."""
        return "closed" if self.closed else "ended" if self.ended else "open"

    def close(self, reason: str) -> bool:
        """It was closed here; False if it already was."""
        with self._lock:
            if self._closed:
                return False
            self._closed = reason
            return True

    def lose_peer(self, reason: str) -> bool:
        """The peer is gone; False if it had ended before.

        That it has said so counts more than that its connection ended, which may be seen first.
        """
        if reason == self.CLOSED_BY_PEER and self.peer_lost:
            self._reason = reason
        return self._end(PeerGoneError, reason)

    def fail(self, reason: str) -> bool:
        """The stream cannot be trusted any more; False if it had ended before."""
        return self._end(TransportError, reason)

    def _after_fork_in_child(self) -> None:
        self._closed = self._closed or "belongs to the process that this one was forked from"

    def error(self) -> KvplugError:
        """A fresh exception that says how it ended."""
        if self._closed:
            return ClosedError(f"{self._what} {self._closed}")
        if self._reason:
            error = self._error(f"{self._what}: {self._reason}")
            if isinstance(error, PeerGoneError):
                error.closed = self._reason == self.CLOSED_BY_PEER
            return error
        return PeerGoneError(f"{self._what}: the connection ended")

    def _end(self, error: type[KvplugError], reason: str) -> bool:
        with self._lock:
            if self._reason:
                return False
            self._error, self._reason = error, reason
            return True


class DescriptorGuard:
    """Counts the threads that use descriptors, and closes them when the last has left after the end.

    A descriptor that is closed under a blocked call may be reused for another file, and the call continues
    with that file. So ending a pipe shuts its sockets down, which wakes every thread, and the last thread to
    leave closes them.

    ``with guard:`` around a call that uses them; it raises what ``refusal`` makes once they are retired. In a
    forked child they are closed at once.
    """

    def __init__(self, close: Callable[[], None], refusal: Callable[[], Exception]) -> None:
        """``close`` must be idempotent: a forked child calls it also for what its parent had closed. A number
        that is closed twice may be another file's by then.
        """
        self._close = close
        self._refusal = refusal
        self._lock = threading.Lock()
        self._inside = 0
        self._over = False
        self._closed = False
        close_after_fork(self)

    @property
    def retired(self) -> bool:
        """Whether no thread enters any more."""
        return self._over

    def enter(self) -> bool:
        """Whether the descriptors may be used; if so, call :meth:`leave` afterwards."""
        with self._lock:
            if self._over:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """The thread uses them no more."""
        with self._lock:
            self._inside -= 1
        if self._over:
            self._maybe_close()

    def retire(self) -> None:
        """No thread enters any more; close them when the last one has left. Idempotent."""
        with self._lock:
            self._over = True
        self._maybe_close()

    def _after_fork_in_child(self) -> None:
        """Close them now, even if threads of the parent were inside."""
        self._over = self._closed = True
        self._close()

    def __enter__(self) -> None:
        if not self.enter():
            raise self._refusal()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _maybe_close(self) -> None:
        with self._lock:
            if not self._over or self._inside or self._closed:
                return
            self._closed = True
        self._close()


class SendWindow:
    """Counts what was sent and is not yet taken, in bytes, and makes senders wait while that is too much.

    An outbox has one, and uses its lock for what it queues as well. The lock is re-entrant: a signal's
    handler may abort the pipe while its own thread is in here.
    """

    SMALLEST_COST: ClassVar[int] = 256
    """The cost of an empty message, so that the number of messages in flight is bounded too."""

    def __init__(self, *, limit: int, peer: str, lifecycle: Lifecycle) -> None:
        """``limit`` is the option ``max_in_flight_bytes``."""
        self.limit = limit
        """Bytes that may be unsent."""
        self.lock = threading.RLock()
        """Guards the window, and the transport's own queue beside it."""
        self.room = threading.Condition(self.lock)
        """Notified when there may be room, and at the end."""
        self.in_flight = 0
        """Bytes that were sent and not yet taken, each message at its cost."""
        self.ended = False
        """Nothing is sent any more. Set by :meth:`end`."""
        self._peer = peer
        self._lifecycle = lifecycle

    @property
    def held(self) -> int:
        """Bytes that count against the limit."""
        return self.in_flight

    def cost(self, nbytes: int) -> int:
        """The cost of a message of ``nbytes`` bytes."""
        return max(self.SMALLEST_COST, nbytes)

    def wait_for_room(self, nbytes: int, deadline: Deadline) -> None:
        """Return when a message of ``nbytes`` may be added. Call it with the lock, which is released
        meanwhile.

        One message larger than the limit passes alone.

        Raises:
            TimeoutError: there was no room in time.
            KvplugError: the pipe has ended, and how.
        """
        cost = self.cost(nbytes)
        while True:
            if self._lifecycle.ended or self.ended:
                raise self._lifecycle.error()
            held = self.held
            if not held or held + cost <= self.limit:
                return
            if not self._wait(cost, deadline) and deadline.expired:
                raise TimeoutError(
                    f"{self._peer} has not taken the {held} bytes that are queued for it;"
                    f" there was no room for {nbytes} more (max_in_flight_bytes is"
                    f" {self.limit}), and nothing was queued"
                )

    def add(self, cost: int) -> None:
        """A message was queued. With the lock."""
        self.in_flight += cost

    def settle(self, cost: int) -> None:
        """A message was taken, or is not sent after all. With the lock."""
        self.in_flight -= cost
        self.room.notify_all()

    def drain(self, deadline: Deadline) -> bool:
        """Refuse senders that wait for room, then wait until nothing is in flight.

        The pipe was closed before. Returns False at the deadline, and when sending has ended otherwise.
        """
        with self.lock:
            self.room.notify_all()
            while self.in_flight and not self.ended:
                if not self.room.wait(deadline.remaining()) and deadline.expired:
                    return False
            return not self.ended

    def end(self) -> None:
        """Nothing is sent any more; threads that wait are woken. With the lock."""
        self.ended = True
        self.room.notify_all()

    def _wait(self, cost: int, deadline: Deadline) -> bool:
        """Whether something changed before the deadline."""
        return self.room.wait(deadline.remaining())


@attrs.frozen(kw_only=True)
class PipeSettings:
    """The settings of every pipe of an endpoint. A transport adds its own."""

    max_in_flight_bytes: int
    """Bytes that may be sent and not yet taken, before ``send_tensor`` blocks."""
    timeout_s: float
    """The default timeout of calls, in seconds."""
    heartbeat_timeout_s: float
    """Seconds of silence that count as the peer's death, if its process cannot be watched."""
    max_message_bytes: int | None = None
    """The context's: the largest message that is received into memory of the pipe's."""


class DuplexPipe(Pipe, abc.ABC):
    """The base of pipes: a transport implements how bytes move, and what is released at the end.

    It checks each call, keeps deadlines, lets one thread send and one receive, and ends once, for one reason;
    in a forked child it is closed. A transport implements the methods whose names begin with ``_``; it calls
    :meth:`_peer_gone` and :meth:`_fail` from any thread, without locks.
    """

    def __init__(self, peer: str, timeout_s: float, limit: MessageLimit | None = None) -> None:
        """``peer`` names the other end in messages; ``timeout_s`` is the default timeout of calls. ``limit``
        bounds the messages that the transport takes memory for: it checks it before.
        """
        self._peer = peer
        self._timeout_s = timeout_s
        self._limit = limit or MessageLimit()
        self._lifecycle = Lifecycle(f"the pipe to {peer}")
        self._doing = f"the pipe to {peer}"
        self._sending, self._receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self._let_go = False
        """Everything was released."""
        ExitGuard.register(self)
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._peer}, {self._lifecycle.state}>"

    @property
    def closed(self) -> bool:
        return self._lifecycle.closed

    @property
    def peer(self) -> str:
        return self._peer

    # -- the calls -------------------------------------------------------------------------------------

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        return self._counted_send(
            lambda: self._in_turn(self._sending, self._check_sending, self._send_tensor, tensor, timeout),
            lambda: 0 if tensor is None else int(tensor.nbytes),
        )

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        return self._counted_receive(
            lambda: self._in_turn(self._receiving, self._check_receiving, self._receive_tensor, out, timeout),
            lambda tensor: 0 if tensor is None else int(tensor.nbytes),
        )

    def send_blocks(
        self,
        views: BlockViews | Sequence[Tensor],
        block_ids: Sequence[int],
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Transfer:
        def send() -> Transfer:
            return self._send_blocks(Blocks(views, block_ids), Deadline.after(timeout, self._timeout_s))

        return self._counted_send(
            lambda: self._in_turn(self._sending, self._check_sending, send),
            lambda: nbytes_of_blocks(views, block_ids),
        )

    def recv_blocks(
        self,
        views: BlockViews | Sequence[Tensor],
        block_ids: Sequence[int],
        *,
        on_layer: Callable[[int], None] | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        def receive() -> None:
            blocks = Blocks(views, block_ids, on_layer=on_layer)
            blocks.check_distinct()
            self._receive_blocks(blocks, Deadline.after(timeout, self._timeout_s))
            blocks.arrived(blocks.nbytes)

        self._counted_receive(
            lambda: self._in_turn(self._receiving, self._check_receiving, receive),
            lambda _: nbytes_of_blocks(views, block_ids),
        )

    def _in_turn(
        self, use: ExclusiveUse, check: Callable[[], None], call: Callable[..., T], *arguments: Any
    ) -> T:
        # Checks twice whether the pipe has ended. A program that leaves ends its pipes, and then waits for
        # those in use. A call that begins at that moment sees the end, or is waited for; one that has failed
        # then does not return.
        try:
            check()
            with use.taken():
                check()
                return call(*arguments)
        except BaseException as e:
            ExitGuard.hold()
            NamedExhaustion.check(e, self._doing)
            raise

    def limit_messages(self, nbytes: int) -> None:
        self._limit.lower(nbytes)

    def _close(self, timeout: Timeout) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        if not self._lifecycle.close("is closed"):
            return
        with NamedExhaustion(self._doing):
            try:
                self._drain(deadline)
            finally:
                self._end()
            self._join_threads()

    def _abort(self) -> None:
        # Also ends a close() that is still draining in another thread.
        if self._lifecycle.close("was aborted") or not self._let_go:
            self._end()

    def _end_at_exit(self) -> None:
        self.abort()

    def _is_in_use(self) -> bool:
        return self._sending.busy or self._receiving.busy

    def _check_sending(self) -> None:
        if self._lifecycle.ended:
            raise self._lifecycle.error()

    def _check_receiving(self) -> None:
        # A peer that is gone may have left whole messages behind: only a pipe closed here is over.
        if self._lifecycle.closed or self._lifecycle.broken:
            raise self._lifecycle.error()

    # -- what a transport writes: moving bytes -----------------------------------------------------------

    @abc.abstractmethod
    def _send(self, tensor: Tensor | None, deadline: Deadline) -> Transfer:
        """Queue one message. Only one thread at a time. Raises as :meth:`Pipe.send_tensor`."""

    @abc.abstractmethod
    def _receive(self, out: Tensor | None, deadline: Deadline) -> Tensor | None:
        """The next message. Only one thread at a time. Raises as :meth:`Pipe.recv_tensor`."""

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        """:meth:`_send`; a transport overrides it where it can often do without a deadline."""
        return self._send(tensor, Deadline.after(timeout, self._timeout_s))

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        """:meth:`_receive`; a transport overrides it where it can often do without a deadline."""
        return self._receive(out, Deadline.after(timeout, self._timeout_s))

    def _send_blocks(self, blocks: Blocks, deadline: Deadline) -> Transfer:
        """The same for blocks of a cache; gathers them first unless a transport overrides it."""
        return self._send(blocks.gathered(), deadline)

    def _receive_blocks(self, blocks: Blocks, deadline: Deadline) -> None:
        """The same for blocks of a cache; scatters them at the end unless a transport overrides it."""
        tensor = blocks.empty()
        self._receive(tensor, deadline)
        blocks.scatter(0, tensor.view(blocks.num_rows, *blocks.row_shape))

    # -- what a transport writes: how it ends ------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        """After ``close``: wake the receiver, and send what is queued until the deadline. May raise."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Wake every thread, fail what is queued, release everything. Never blocks. Idempotent.

        Called in any thread, also in a signal handler.
        """

    def _join_threads(self) -> None:
        """After ``close``: wait for the pipe's threads, for a moment, except for the calling one."""

    def _on_peer_gone(self) -> None:
        """The peer is gone: wake every thread. Messages that have wholly arrived can still be received."""
        self._end()

    def _on_failure(self) -> None:
        """The stream has lost its place: wake every thread. Nothing is received any more."""
        self._end()

    def _release_in_child(self) -> None:
        """In a forked child: close descriptors and memory that no :class:`DescriptorGuard`, connection or
        channel closes. Transfers end by themselves, and so do calls."""

    # -- how it ends, from any thread --------------------------------------------------------------------

    def _end(self) -> None:
        self._release()
        self._let_go = True

    def _peer_gone(self, reason: str) -> None:
        """The peer is gone. Called without locks, by the thread that notices it first."""
        if self._lifecycle.lose_peer(reason):
            self._logger.debug("%r: %s", self, reason)
        self._on_peer_gone()

    def _fail(self, reason: str) -> None:
        """The stream cannot be trusted any more. Called without locks."""
        if self._lifecycle.fail(reason):
            self._logger.warning("%r: %s", self, reason)
        self._on_failure()

    @property
    def _logger(self) -> logging.Logger:
        return logging.getLogger(type(self).__module__)

    def _after_fork_in_child(self) -> None:
        self._let_go = True
        self._release_in_child()
