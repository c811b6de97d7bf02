"""A pipe: its calls, the methods that a transport implements, and how a pipe ends.

``Tensor`` below is ``torch.Tensor``; this module does not import torch.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import attrs

from kvplug.errors import ClosedError, KvplugError, PeerGoneError, TransportError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exclusive_use import ExclusiveUse
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.memory.room import MessageLimit
from kvplug.net.threads import ExitGuard
from kvplug.transport.block_views import BlockViews
from kvplug.transport.pipe.blocks import Blocks, nbytes_of_blocks
from kvplug.transport.pipe.transfer import Transfer

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug.transport.pipe.endpoint import PipeEndpoint


T = TypeVar("T")


class Recorder(Protocol):
    """Counts and measures the traffic of one pipe."""

    def sent(self, pipe: Pipe, send: Callable[[], Transfer], nbytes: Callable[[], int]) -> Transfer:
        """Send a message, and count it when its transfer ends."""

    def received(self, pipe: Pipe, receive: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        """Receive a message, and count it."""

    def ended(self, *, may_wait: bool) -> None:
        """Record that this end was closed (``may_wait``) or aborted."""


class Pipe(abc.ABC):
    """Ordered tensors to and from one peer.

    Law. Tensors arrive whole, in order, exactly once, with shape, dtype and bits unchanged: every
    torch dtype, 0-d, empty and non-contiguous tensors, and ``None``, which is a message too. When the
    peer dies, every call raises ``PeerGoneError``, even one that is already blocked; messages that had
    wholly arrived may be received first, but never part of a message. A peer on this host that is stopped
    or busy is alive: calls raise ``TimeoutError``. Every transfer that was started ends.

    Callers. Connectors and lookup buffers. One thread may send while another one receives; a second
    thread in the same direction gets ``BusyError``. Any thread may call ``close`` and ``abort``.

    Not promised. Delivery: ``done()`` means that the source may be overwritten, not that the peer has read
    the message. Nothing is retried.

    A subclass implements the abstract methods whose names begin with ``_``; the public ones call them and
    count the traffic. Transports subclass :class:`~kvplug.transport.DuplexPipe`.
    """

    @attrs.frozen(kw_only=True)
    class PathReport:
        """What a transport knows about the path of one pipe. Rates are in 10^9 bytes per second."""

        measured_gb_per_s: float | None = None
        """The rate that the transport measured when the pipe began; ``None`` if it did not measure."""
        expected_gb_per_s: float | None = None
        """The rate that the path should reach, if the transport knows better than the spec's ``Cost``, for
        example from an option. ``0``: no rate is expected. ``None``: the rate that the ``Cost`` claims."""
        reason: str = ""
        """Why the path may be slow, as far as the transport can see, and what to change; empty if it sees no
        reason."""

    recorder: Recorder | None = None
    """Counts and measures the traffic; set by the program that opened the pipe."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether ``close`` or ``abort`` was called here."""

    @property
    @abc.abstractmethod
    def peer(self) -> str:
        """The process at the other end, for messages; pid and host where known."""

    @property
    def route(self) -> str:
        """What carries the bytes, for logs and metrics: the transport and its lanes, such as
        ``nixl rma(rc_mlx5/mlx5_0:1)``. It should have few different values, since each becomes a series in
        the metrics. Empty if the transport does not name a route."""
        return ""

    @property
    def fills_blocks(self) -> bool:
        """Whether :meth:`recv_blocks` writes into the blocks while a message arrives. If not, the pipe
        receives the message into its own memory, and copies it at the end."""
        return type(self)._receive_blocks is not Pipe._receive_blocks

    def path_report(self) -> Pipe.PathReport:
        """Report what the transport knows about its path's speed. Called once when the pipe begins, and again
        before an alarm that the path is slow. It may inspect the host, but must not wait for the peer."""
        return Pipe.PathReport()

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        """Queue one message. Return at once, or block while ``max_in_flight_bytes`` are in flight.

        A message larger than that limit is sent when nothing else is in flight. The pipe keeps ``tensor``
        alive; the caller may overwrite it once the transfer is done. A tensor on a device is read after the
        work that was queued earlier on the caller's current stream; a transport may wait for that work here.

        Raises:
            TimeoutError: there was no room in time, or the device had not written the tensor in time; nothing
                was queued.
            PeerGoneError, ClosedError, BusyError: as the law says.
            UnsupportedError: the pipe does not carry the tensor's device or dtype; nothing was queued.
            ResourceExhaustedError: no thread or memory is free for the message. Nothing was queued, or the
                pipe is broken, as later calls report.
        """
        return self._send_counted(lambda: self._send_tensor(tensor, timeout), lambda: _nbytes(tensor))

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        """Receive the next message into ``out``, or into new memory if ``out`` is ``None``, and return it.

        ``out`` must have the message's shape and dtype, and may be non-contiguous. On a device, work that was
        queued earlier on the caller's current stream may still read the old content of ``out``; work that is
        queued on that stream afterwards sees the message.

        Raises:
            TensorMismatchError: ``out`` does not fit, or the message is ``None`` and ``out`` was given;
                the message stays and can be received by another call.
            CapacityError: without ``out``, the message is larger than the context's ``max_message_bytes``,
                than :meth:`limit_messages` allows, or than the free memory; the message stays.
            TimeoutError: nothing (or not all) arrived in time. The next call receives or resumes the
                message, unless the pipe is broken: later calls report that. A message is never skipped.
            ResourceExhaustedError: no thread or memory is free for the message. The next call can receive
                it, as after a ``TimeoutError``.
            PeerGoneError, ClosedError, BusyError: as the law says.
        """
        return self._receive_counted(lambda: self._receive_tensor(out, timeout), _nbytes)

    def send_blocks(
        self,
        views: BlockViews | Sequence[Tensor],
        block_ids: Sequence[int],
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Transfer:
        """Queue the blocks ``block_ids`` of all layers as one message.

        Make ``views`` once for each cache, with :meth:`kvplug.engine.KVLayout.page_views` or as
        :class:`BlockViews`. Plain tensors are layers with one part each, and are checked in each call. The
        message is the tensor that :class:`Blocks` describes, and may be received as a tensor. The blocks are
        gathered first, unless the transport can gather them into its own memory.

        Raises:
            LayoutError: as :class:`Blocks` raises it; nothing was queued.
            TimeoutError, PeerGoneError, ClosedError, BusyError, UnsupportedError: as :meth:`send_tensor`
                says.
        """
        return self._send_counted(
            lambda: self._send_blocks(Blocks(views, block_ids), timeout),
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
        """Receive the next message into the blocks ``block_ids`` of all layers.

        Blocks on a device are written in the order of the caller's current stream, as ``out`` of
        :meth:`recv_tensor` is. After an error the blocks may hold part of the message; the message stays, or
        the next call resumes it.

        Args:
            on_layer: Called in this thread with the index of each layer of ``views``, in order, once its
                blocks are written: while later layers arrive if the transport can do that, else at the end.
                Exceptions that it raises are logged. A call that resumes a message reports all layers.

        Raises:
            LayoutError: as :class:`Blocks` raises it, or a block appears twice; the message stays.
            TensorMismatchError, TimeoutError, PeerGoneError, ClosedError, BusyError: as :meth:`recv_tensor`
                says, with ``out``.
        """

        def receive() -> None:
            blocks = Blocks(views, block_ids, on_layer=on_layer)
            blocks.check_distinct()
            self._receive_blocks(blocks, timeout)
            blocks.arrived(blocks.nbytes)

        self._receive_counted(receive, lambda _: nbytes_of_blocks(views, block_ids))

    def limit_messages(self, nbytes: int) -> None:  # noqa: B027 - not every transport can
        """Allocate no memory for messages of more than ``nbytes`` bytes from now on.

        ``recv_tensor`` without ``out`` raises ``CapacityError`` for such messages, and they stay. Users whose
        messages are small should set this, since a peer may announce any size. A transport that does not
        override this method has only the limit of its context.
        """

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send all queued messages within ``timeout``, then end. Idempotent. Never raises for a dead peer."""
        try:
            self._close(timeout)
        finally:
            if self.recorder is not None:
                self.recorder.ended(may_wait=True)

    def abort(self) -> None:
        """End at once: queued transfers fail with ``ClosedError``. Idempotent, never blocks."""
        try:
            self._abort()
        finally:
            if self.recorder is not None:
                self.recorder.ended(may_wait=False)

    # -- what a pipe implements ------------------------------------------------------------------------

    @abc.abstractmethod
    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        """Implement :meth:`send_tensor`."""

    @abc.abstractmethod
    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        """Implement :meth:`recv_tensor`."""

    def _send_blocks(self, blocks: Blocks, timeout: Timeout) -> Transfer:
        """Implement :meth:`send_blocks`. By default, gather the blocks first, unless they are one piece."""
        piece = blocks.in_place()
        return self._send_tensor(blocks.gathered() if piece is None else piece, timeout)

    def _receive_blocks(self, blocks: Blocks, timeout: Timeout) -> None:
        """Implement :meth:`recv_blocks`. By default, scatter the blocks at the end, unless they are one
        piece."""
        piece = blocks.in_place()
        tensor = blocks.empty() if piece is None else piece
        self._receive_tensor(tensor, timeout)
        if piece is None:
            blocks.scatter(0, tensor.view(blocks.num_rows, *blocks.row_shape))

    @abc.abstractmethod
    def _close(self, timeout: Timeout) -> None:
        """Implement :meth:`close`."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """Implement :meth:`abort`."""

    # -- around each call ------------------------------------------------------------------------------

    def _send_counted(self, send: Callable[[], Transfer], nbytes: Callable[[], int]) -> Transfer:
        if self.recorder is None:
            return self._call_sending(send)
        return self.recorder.sent(self, lambda: self._call_sending(send), nbytes)

    def _receive_counted(self, receive: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        if self.recorder is None:
            return self._call_receiving(receive)
        return self.recorder.received(self, lambda: self._call_receiving(receive), nbytes)

    def _call_sending(self, send: Callable[[], T]) -> T:
        return send()

    def _call_receiving(self, receive: Callable[[], T]) -> T:
        return receive()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: object, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.nbytes)


class DescriptorGuard:
    """Counts the threads that use descriptors. After :meth:`retire`, the last one to leave closes them.

    If a descriptor is closed while a call is blocked on it, its number may be reused for another file, and
    the call continues with that file. So ending a pipe shuts its sockets down, which wakes every thread, and
    the last thread to leave closes them.

    Put ``with guard:`` around each call that uses the descriptors; after :meth:`retire`, it raises the
    exception that ``refusal`` returns. In a forked child the descriptors are closed at once.
    """

    def __init__(self, close: Callable[[], None], refusal: Callable[[], Exception]) -> None:
        """``close`` must be idempotent: a forked child calls it even if the parent had already closed the
        descriptors, whose numbers may belong to other files by then.
        """
        self._close = close
        self._refusal = refusal
        self._lock = threading.RLock()  # a signal handler may retire it while its own thread holds the lock
        self._inside = 0
        self._over = False
        self._closed = False
        close_after_fork(self)

    @property
    def retired(self) -> bool:
        """Whether :meth:`retire` was called, or this is a forked child."""
        return self._over

    def enter(self) -> bool:
        """Return whether the descriptors may be used. If so, call :meth:`leave` afterwards."""
        with self._lock:
            if self._over:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """Record that a thread has finished using the descriptors."""
        with self._lock:
            self._inside -= 1
        if self._over:
            self._maybe_close()

    def retire(self) -> None:
        """Refuse new threads, and close the descriptors when the last thread has left. Idempotent."""
        with self._lock:
            self._over = True
        self._maybe_close()

    def _after_fork_in_child(self) -> None:
        """Close the descriptors now, even if threads of the parent were using them."""
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


class DuplexPipe(Pipe, abc.ABC):
    """The base of pipes: a transport implements how bytes move, and what is released at the end.

    The base checks each call, admits one sending and one receiving thread, and ends the pipe once, for one
    reason; in a forked child the pipe is closed. A transport implements the methods whose names begin with
    ``_``, and gets their deadlines from :meth:`_deadline`. It may call :meth:`_peer_gone` and :meth:`_fail`
    from any thread, without holding locks.

    Only one thread at a time runs ``_send_tensor`` or ``_send_blocks``, and only one runs ``_receive_tensor``
    or ``_receive_blocks``.
    """

    class Lifecycle:
        """Records whether something, such as a pipe, has ended, and why.

        The first reason is kept, except that closing at this end replaces it. A forked child counts as
        closed.

        >>> pipe = DuplexPipe.Lifecycle("the pipe to pid 7")
        >>> pipe.lose_peer("it was killed"), pipe.lose_peer("it hung up")
        (True, False)
        >>> pipe.error()
        PeerGoneError('the pipe to pid 7: it was killed')
        """

        CLOSED_BY_PEER = "the peer closed it"
        """The reason for :meth:`lose_peer` if the peer announced its close, and all its messages were
        received."""

        def __init__(self, what: str) -> None:
            """``what`` names the pipe or other thing in errors: "the pipe to pid 7"."""
            self._what = what
            self._lock = threading.Lock()
            self._error: type[KvplugError] = KvplugError
            self._reason = ""
            self._closed = ""
            close_after_fork(self)

        @property
        def closed(self) -> bool:
            """Whether this end was closed, or this is a forked child."""
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
            """For a ``repr``: "open", "closed" (at this end) or "ended"."""
            return "closed" if self.closed else "ended" if self.ended else "open"

        def close(self, reason: str) -> bool:
            """Record that this end was closed. Return False if it already was."""
            with self._lock:
                if self._closed:
                    return False
                self._closed = reason
                return True

        def lose_peer(self, reason: str) -> bool:
            """Record that the peer is gone. Return False if an end was recorded before.

            :attr:`CLOSED_BY_PEER` replaces another reason of this kind: this end may notice that the
            connection ended before it reads that the peer closed it.
            """
            if reason == self.CLOSED_BY_PEER and self.peer_lost:
                self._reason = reason
            return self._end(PeerGoneError, reason)

        def fail(self, reason: str) -> bool:
            """Record that the stream cannot be trusted any more. Return False if an end was recorded
            before."""
            return self._end(TransportError, reason)

        def _after_fork_in_child(self) -> None:
            self._closed = self._closed or "belongs to the process that this one was forked from"

        def error(self) -> KvplugError:
            """Return a new exception that says how it ended."""
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

    @attrs.frozen(kw_only=True)
    class Settings:
        """The settings that every pipe takes from its endpoint's context. A transport adds its own."""

        timeout_s: float
        """The default timeout of calls, in seconds."""
        heartbeat_timeout_s: float
        """Seconds of silence that count as the peer's death, if its process cannot be watched."""
        max_message_bytes: int | None
        """The largest message for which the pipe allocates memory."""

        @classmethod
        def of(cls, context: PipeEndpoint.Context, **own: Any) -> Self:
            """Return the settings from a context, together with the transport's ``own``."""
            return cls(
                timeout_s=context.timeout_s,
                heartbeat_timeout_s=context.heartbeat_timeout_s,
                max_message_bytes=context.max_message_bytes,
                **own,
            )

    def __init__(self, peer: str, settings: Settings, *, device: str = "cpu") -> None:
        """``peer`` names the other end in errors. ``device`` is where the pipe allocates memory for messages,
        after it has compared their size with ``_limit``.
        """
        self._peer = peer
        self._timeout_s = settings.timeout_s
        self._limit = MessageLimit(settings.max_message_bytes, device=device)
        self._lifecycle = self.Lifecycle(f"the pipe to {peer}")
        self._doing = f"the pipe to {peer}"
        self._sending, self._receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self._let_go = False
        """Whether everything was released."""
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

    def _deadline(self, timeout: Timeout) -> Deadline:
        """Return the deadline of a call with this ``timeout``."""
        return Deadline.after(timeout, self._timeout_s)

    def _call_sending(self, send: Callable[[], T]) -> T:
        return self._in_turn(self._sending, self._check_sending, send)

    def _call_receiving(self, receive: Callable[[], T]) -> T:
        return self._in_turn(self._receiving, self._check_receiving, receive)

    def _in_turn(self, use: ExclusiveUse, check: Callable[[], None], call: Callable[[], T]) -> T:
        # Check twice whether the pipe has ended. A program that exits ends its pipes, then waits for calls in
        # progress. Either a call that begins at that moment sees the end, or the program waits for that call.
        # A call that fails while the program exits does not return.
        try:
            check()
            with use.taken():
                check()
                return call()
        except BaseException as e:
            ExitGuard.hold()
            NamedExhaustion.check(e, self._doing)
            raise

    def limit_messages(self, nbytes: int) -> None:
        self._limit.lower(nbytes)

    def _close(self, timeout: Timeout) -> None:
        deadline = self._deadline(timeout)
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
        # A peer that is gone may have left whole messages behind, so losing the peer is not an error here.
        if self._lifecycle.closed or self._lifecycle.broken:
            raise self._lifecycle.error()

    # -- what a transport writes: how it ends ------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        """Wake the receiver, and send queued messages until the deadline. Called by ``close``. May raise."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Wake every thread, fail all queued transfers and release everything. Never blocks. Idempotent.

        Called in any thread, even in a signal handler.
        """

    def _join_threads(self) -> None:
        """Wait briefly for the pipe's threads other than the calling one. Called by ``close``."""

    def _on_peer_gone(self) -> None:
        """Wake every thread: the peer is gone. Messages that have wholly arrived can still be received."""
        self._end()

    def _on_failure(self) -> None:
        """Wake every thread: the position in the stream is lost, so nothing more can be received."""
        self._end()

    def _release_in_child(self) -> None:
        """In a forked child, close the descriptors and memory that no :class:`DescriptorGuard`, connection or
        channel closes. Transfers and calls end by themselves."""

    # -- how it ends, from any thread --------------------------------------------------------------------

    def _end(self) -> None:
        self._release()
        self._let_go = True

    def _peer_gone(self, reason: str) -> None:
        """Record that the peer is gone. Called without locks, by the thread that notices it first."""
        if self._lifecycle.lose_peer(reason):
            self._logger.debug("%r: %s", self, reason)
        self._on_peer_gone()

    def _fail(self, reason: str) -> None:
        """Record that the stream cannot be trusted any more. Called without locks."""
        if self._lifecycle.fail(reason):
            self._logger.warning("%r: %s", self, reason)
        self._on_failure()

    @property
    def _logger(self) -> logging.Logger:
        return logging.getLogger(type(self).__module__)

    def _after_fork_in_child(self) -> None:
        self._let_go = True
        self._release_in_child()
