"""What a transport of kind "pipe" implements.

``Tensor`` below is ``torch.Tensor``; this module does not import torch.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

from kvplug.config.addresses import DEFAULT_HOST
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.net.trust.credentials import Credentials
from kvplug.transport.block_views import BlockViews
from kvplug.transport.pipe.blocks import Blocks
from kvplug.transport.pipe.transfer import Transfer

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")


@attrs.frozen(kw_only=True)
class PathReport:
    """What a transport knows of the path of one pipe. Rates are in 10^9 bytes per second."""

    measured_gb_per_s: float | None = None
    """What it measured itself when the pipe began; ``None``: nothing."""
    expected_gb_per_s: float | None = None
    """What the path should carry, where that is better known than by the spec's ``Cost``: by an option, for
    example. ``0``: nothing is expected. ``None``: what the ``Cost`` claims."""
    reason: str = ""
    """Why the path may be slow, as far as the transport sees, and what to change; empty: it sees nothing."""


class Recorder(Protocol):
    """Counts and measures what passes through one pipe."""

    def sent(self, pipe: Pipe, send: Callable[[], Transfer], nbytes: Callable[[], int]) -> Transfer:
        """Send a message, and count it when its transfer ends."""

    def received(self, pipe: Pipe, receive: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        """Receive a message, and count it."""

    def ended(self, *, may_wait: bool) -> None:
        """This end was closed or, where it may not wait, aborted."""


class Pipe(abc.ABC):
    """Ordered tensors to and from one peer.

    Law. Tensors arrive whole, in order, exactly once, with shape, dtype and bits unchanged: every
    torch dtype, 0-d, empty and non-contiguous tensors, and ``None``, which is a message too. When the
    peer dies every call raises ``PeerGoneError``, also one already blocked; messages that had wholly
    arrived may be received first, never part of one. A peer on this host that is stopped or busy is
    alive: calls raise ``TimeoutError``. Every transfer that was started ends.

    Callers. Connectors and lookup buffers. One thread may send while one other receives; a second
    thread in the same direction gets ``BusyError``. ``close`` and ``abort`` may come from any thread.

    Not promised. Delivery once the sender has been told ``done()``: it means that the source may be
    overwritten, not that the peer has read the message. Nothing is retried.

    A subclass implements the methods whose names begin with ``_``; the others call them, and have what passes
    counted. :class:`~kvplug.transport.DuplexPipe` is the base of those of transports.
    """

    recorder: Recorder | None = None
    """What counts and measures what passes; set by the program that has opened the pipe."""

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
        ``nixl rma(rc_mlx5/mlx5_0:1)``. Few different ones, since each is a series. Empty where a transport
        does not say."""
        return ""

    def path_report(self) -> PathReport:
        """What the transport knows of its path's speed. Asked once when the pipe begins, and again before an
        alarm that the path is slow, so it may look at the host; it must not wait for the peer."""
        return PathReport()

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        """Queue one message and return at once, unless ``max_in_flight_bytes`` are unsent: then block.

        One message larger than that limit passes alone. The pipe keeps ``tensor`` alive; the caller
        may overwrite it once the transfer is done. A tensor on a device is read when the device has done
        what the caller's current stream was given before; a transport may wait for that here.

        Raises:
            TimeoutError: there was no room in time, or the device had not written the tensor; nothing was
                queued.
            PeerGoneError, ClosedError, BusyError: as the law says.
            UnsupportedError: the tensor's device or dtype is not carried; nothing was queued.
            ResourceExhaustedError: there is no free thread or memory for it. Nothing was queued, or the pipe
                is broken and says so.
        """
        return self._counted_send(lambda: self._send_tensor(tensor, timeout), lambda: _nbytes(tensor))

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        """The next message. With ``out`` it is received into that memory, and ``out`` is returned.

        ``out`` must have the message's shape and dtype and may be non-contiguous. On a device it is written
        when the device has done what the caller's current stream was given before, which may still read it;
        what the stream is given afterwards reads the message.

        Raises:
            TensorMismatchError: ``out`` does not fit, or the message is ``None`` and ``out`` was given;
                the message stays and can be received by another call.
            CapacityError: without ``out``: the message is larger than the context's ``max_message_bytes``,
                than :meth:`limit_messages` allows, or than the memory there is; it stays.
            TimeoutError: nothing (or not all) arrived in time. Nothing is lost: the next call gets the
                message, or goes on with it; or the pipe is broken and says so. It is never skipped.
            ResourceExhaustedError: there is no free thread or memory for it; the same holds.
            PeerGoneError, ClosedError, BusyError: as the law says.
        """
        return self._counted_receive(lambda: self._receive_tensor(out, timeout), _nbytes)

    def send_blocks(
        self,
        views: BlockViews | Sequence[Tensor],
        block_ids: Sequence[int],
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Transfer:
        """Queue the blocks ``block_ids`` of all layers as one message.

        ``views`` is best made once for each cache, by :meth:`kvplug.engine.KVLayout.page_views` or as
        :class:`BlockViews`. Plain tensors are layers with one part each, and are checked in each call. The
        message is the tensor that :class:`Blocks` describes, and may be received as one. Written here for
        every pipe: it is gathered first. A transport that can gather into its own memory does that instead.

        Raises:
            LayoutError: as :class:`Blocks` says; nothing was queued.
            TimeoutError, PeerGoneError, ClosedError, BusyError, UnsupportedError: as :meth:`send_tensor`
                says.
        """
        return self.send_tensor(Blocks(views, block_ids).gathered(), timeout=timeout)

    def recv_blocks(
        self,
        views: BlockViews | Sequence[Tensor],
        block_ids: Sequence[int],
        *,
        on_layer: Callable[[int], None] | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        """The next message, received into the blocks ``block_ids`` of all layers.

        Blocks on a device are written in the order of the caller's current stream, as ``out`` of
        :meth:`recv_tensor` is. After an error they may hold a part of the message; it stays, or is resumed by
        the next call. Written here for every pipe, as :meth:`send_blocks` is.

        Args:
            on_layer: Called in this thread with the index of each layer of ``views``, in order, once its
                blocks are written: while later layers are on their way if the transport can, at the end
                otherwise. What it raises is logged. A call that resumes a message reports all layers.

        Raises:
            LayoutError: as :class:`Blocks` says, or a block comes twice; the message stays.
            TensorMismatchError, TimeoutError, PeerGoneError, ClosedError, BusyError: as :meth:`recv_tensor`
                says, with ``out``.
        """
        blocks = Blocks(views, block_ids, on_layer=on_layer)
        blocks.check_distinct()
        tensor = blocks.empty()
        self.recv_tensor(tensor, timeout=timeout)
        blocks.scatter(0, tensor.view(blocks.num_rows, *blocks.row_shape))
        blocks.arrived(blocks.nbytes)

    def limit_messages(self, nbytes: int) -> None:  # noqa: B027 - a transport need not be able to
        """Take no memory for messages of more than ``nbytes`` bytes from now on.

        ``recv_tensor`` without ``out`` raises ``CapacityError`` for them, and they stay. For users whose
        messages are small, since a peer may announce any size. A transport that does not override it has only
        the limit of its context.
        """

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send what is queued within ``timeout``, then end. Idempotent. Never raises for a dead peer."""
        try:
            self._close(timeout)
        finally:
            if self.recorder is not None:
                self.recorder.ended(may_wait=True)

    def abort(self) -> None:
        """End at once: what is queued fails with ``ClosedError``. Idempotent, never blocks."""
        try:
            self._abort()
        finally:
            if self.recorder is not None:
                self.recorder.ended(may_wait=False)

    # -- what a pipe implements ------------------------------------------------------------------------

    @abc.abstractmethod
    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        """:meth:`send_tensor`."""

    @abc.abstractmethod
    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        """:meth:`recv_tensor`."""

    @abc.abstractmethod
    def _close(self, timeout: Timeout) -> None:
        """:meth:`close`."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """:meth:`abort`."""

    def _counted_send(self, send: Callable[[], Transfer], nbytes: Callable[[], int]) -> Transfer:
        return send() if self.recorder is None else self.recorder.sent(self, send, nbytes)

    def _counted_receive(self, receive: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        return receive() if self.recorder is None else self.recorder.received(self, receive, nbytes)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: object, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.nbytes)


class PipeListener(abc.ABC):
    """Waits for peers. Each ``accept`` returns one more pipe; peers connect and leave independently."""

    @property
    @abc.abstractmethod
    def contact(self) -> str:
        """A short opaque string, for one ``connect`` or many."""

    @abc.abstractmethod
    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """The pipe to the next peer that has connected and proved itself.

        Pipes that one peer connects one after the other may be accepted in another order.

        Raises:
            TimeoutError: no peer connected.
            ResourceExhaustedError: a peer connected, and the process has no free descriptor, thread or memory
                for its pipe. The listener goes on.
            ClosedError: the listener is closed (also when that happens during the wait).
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening; accepted pipes live on. Idempotent."""


class PipeEndpoint(abc.ABC):
    """What a pipe transport's factory returns: the two verbs a transport implements."""

    @abc.abstractmethod
    def listen(self) -> PipeListener:
        """Start to listen where the context says.

        Raises:
            AddressInUseError, InsecureAddressError, TransportError: it cannot, and why.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for it.
        """

    @abc.abstractmethod
    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """A pipe to the listener that gave out ``contact``.

        Raises:
            TimeoutError: it did not answer in time.
            PeerGoneError: no process listens there any more.
            AuthenticationError: one end did not prove itself to the other.
            WireError: the contact is not one of this transport's.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for it.
        """


@attrs.frozen(kw_only=True)
class PipeContext:
    """For the factory of a pipe transport, which returns a ``PipeEndpoint``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    credentials: Credentials
    """What its listeners and connections prove themselves with."""
    host: str = DEFAULT_HOST
    """Where it may listen: on a host's interface, or, for a Unix socket, on this host only."""
    device: str = "cpu"
    """The device of the tensors, such as ``cuda:0``."""
    timeout_s: float = 30.0
    """Seconds that a call waits where it says nothing else."""
    heartbeat_timeout_s: float = 10.0
    """Seconds of silence after which a peer on another host counts as dead."""
    max_message_bytes: int | None = None
    """The largest message for which a pipe takes memory of its own; ``None``: what the process or device can
    have. It is compared with what a peer announces, before memory is asked for."""
    make_inner: Callable[[], PipeEndpoint] | None = None
    """For a transport that wraps another one (``TransportSpec.wraps``): makes that one's endpoint, with
    its own options and the rest of this context. ``None`` for all others."""
