"""What a transport of kind "pipe" implements.

``Tensor`` below is ``torch.Tensor``; this module does not import torch.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.transport.block_views import BlockViews
from kvplug.transport.pipe.blocks import Blocks
from kvplug.transport.pipe.path import PathReport
from kvplug.transport.pipe.transfer import Transfer

if TYPE_CHECKING:
    from torch import Tensor


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
    """

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

    @abc.abstractmethod
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

    @abc.abstractmethod
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

    def send_blocks(
        self,
        views: BlockViews | Sequence[Tensor],
        block_ids: Sequence[int],
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Transfer:
        """Queue the blocks ``block_ids`` of all layers as one message.

        ``views`` is best made once for each cache, by :func:`kvplug.engine.page_views` or as
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

    @abc.abstractmethod
    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send what is queued within ``timeout``, then end. Idempotent. Never raises for a dead peer."""

    @abc.abstractmethod
    def abort(self) -> None:
        """End at once: what is queued fails with ``ClosedError``. Idempotent, never blocks."""

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: object, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class PipeListener(abc.ABC):
    """Waits for peers. Each ``accept`` returns one more pipe; peers connect and leave independently."""

    @property
    @abc.abstractmethod
    def contact(self) -> str:
        """A short opaque string, for one ``connect`` or many."""

    @abc.abstractmethod
    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """The pipe to the next peer that has connected and proved itself.

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
