"""The life cycle of a pipe: the checks of every call, and what happens when the pipe ends."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exclusive_use import ExclusiveUse
from kvplug.net.exhaustion import NamedExhaustion, raise_if_exhausted
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import end_at_exit, hold_at_exit
from kvplug.transport.block_views import BlockViews
from kvplug.transport.duplex.lifecycle import Lifecycle
from kvplug.transport.duplex.partial import MessageLimit
from kvplug.transport.pipe import Blocks, Pipe, Transfer
from kvplug.transport.pipe.blocks import nbytes_of_blocks

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


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
        end_at_exit(self)
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
            hold_at_exit()
            raise_if_exhausted(e, self._doing)
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
