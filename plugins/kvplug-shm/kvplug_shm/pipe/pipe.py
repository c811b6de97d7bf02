"""The pipe "shm": an outbox and an inbox over two rings of shared memory, and a watch on the peer."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import attrs
import torch

from kvplug import UnsupportedError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import dtype_name
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Blocks,
    Deadline,
    DuplexPipe,
    Segment,
    Timeout,
    Transfer,
)
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.memory.pool import Pool
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.geometry import RingSizes
from kvplug_shm.pipe.inbox import NOT_YET, Inbox
from kvplug_shm.pipe.message import NONE_HEADER, Message, header_of, is_plain
from kvplug_shm.pipe.outbox import Outbox
from kvplug_shm.pipe.rings import Incoming, Outgoing

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class ShmPipeSettings(DuplexPipe.Settings):
    """The settings of a pipe."""

    max_in_flight_bytes: int
    spin_s: float
    pool: Pool


@attrs.frozen(kw_only=True)
class HeldMemory:
    """Bytes of memory that a pipe uses."""

    shared: int
    """The two rings at their usual size; 0 once both have ended."""
    queued: int
    """Sent tensors that are not in the ring yet, in the sender's own memory."""
    idle: int
    """Unused memory in the pool, which all pipes of the endpoint share."""
    lent: int
    """Received tensors that are still referenced."""


class ShmPipe(DuplexPipe):
    """A pipe over two rings, and a connection that is only watched.

    At most one thread, the writer: it starts with the first message that the ring has no room for, and ends
    with the pipe. The process's liveness watcher watches the peer.
    """

    def __init__(
        self,
        peer: JoiningPeer,
        segment: Segment,
        sizes: RingSizes,
        settings: ShmPipeSettings,
        *,
        accepted: bool,
    ) -> None:
        """Takes ownership of the peer's connection and pidfd.

        ``segment``: the two rings; the first one is written by the end that was ``accepted``.
        """
        super().__init__(peer.connection.describe, settings)
        self._control = peer.connection
        self._pool = settings.pool
        self._closing = threading.RLock()  # also for the handler of a signal
        self._outbox = Outbox(
            Outgoing(segment, 0 if accepted else 1, sizes, settings.spin_s),
            peer=self._peer,
            limit=settings.max_in_flight_bytes,
            lifecycle=self._lifecycle,
            lost=self._sending_lost,
            fail_pipe=self._fail,
            stop=self.abort,
        )
        self._inbox = Inbox(
            Incoming(segment, 1 if accepted else 0, sizes, settings.spin_s),
            pool=settings.pool,
            peer=self._peer,
            message_limit=self._limit,
            lifecycle=self._lifecycle,
            lost=self._peer_gone,
            fail_pipe=self._fail,
        )
        self._watch = peer.watch(self._peer_gone)

    @property
    def held(self) -> HeldMemory:
        """The memory that it uses now."""
        rings = (self._outbox.ring, self._inbox.ring)
        return HeldMemory(
            shared=sum(ring.sizes.window for ring in rings if ring is not None),
            queued=self._outbox.queued_bytes,
            idle=self._pool.idle_bytes,
            lent=self._pool.lent_bytes,
        )

    # -- moving bytes: first the fast path, of messages that fit at once -----------------------------------

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        deadline = None if timeout is DEFAULT_TIMEOUT else Deadline.after(timeout)
        transfer = None
        if tensor is None:
            transfer = self._outbox.send_at_once(NONE_HEADER, 0)
        elif is_plain(tensor):
            header = header_of(tensor.dtype, tensor.shape)
            transfer = self._outbox.send_at_once(header, tensor.data_ptr())
        if transfer is None:
            transfer = self._outbox.send(Message.of(tensor), deadline or Deadline.after(self._timeout_s))
        return transfer

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        deadline = None if timeout is DEFAULT_TIMEOUT else Deadline.after(timeout)
        patient = deadline is None or not deadline.expired
        tensor = self._inbox.receive_at_once(out, patient)
        if tensor is NOT_YET:
            tensor = self._inbox.receive(out, deadline or Deadline.after(self._timeout_s))
        return tensor

    def _send_blocks(self, blocks: Blocks, timeout: Timeout) -> Transfer:
        span = _span_of(blocks)
        if span is None:
            message = self._memory_for(blocks)
            blocks.gather(0, message.view(blocks.num_rows, *blocks.row_shape))
            return self._send_tensor(message, timeout)
        header = header_of(blocks.dtype, torch.Size(blocks.shape))
        return self._outbox.send(Message(header, span, blocks), self._deadline(timeout))

    def _receive_blocks(self, blocks: Blocks, timeout: Timeout) -> None:
        span = _span_of(blocks)
        if span is None or self._inbox.keeps_bytes:
            message = self._memory_for(blocks)
            self._receive_tensor(message, timeout)
            blocks.scatter(0, message.view(blocks.num_rows, *blocks.row_shape))
        else:
            self._inbox.receive_blocks(blocks, span, self._deadline(timeout))

    def _memory_for(self, blocks: Blocks) -> Tensor:
        return self._pool.tensor(TensorMeta(dtype_name(blocks.dtype), blocks.shape))

    # -- how it ends -------------------------------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        self._inbox.stop()
        self._outbox.drain(deadline)

    def _release(self) -> None:
        self._outbox.fail()
        self._inbox.stop()
        self._watch.close()
        with self._closing:
            self._let_go = True
            self._control.close()

    def _join_threads(self) -> None:
        self._outbox.join()

    def _release_in_child(self) -> None:
        self._control.close()
        self._outbox.after_fork()
        self._inbox.after_fork()

    def _on_peer_gone(self) -> None:
        # Published messages can still be received: the pipe ends only after them.
        self._outbox.fail()
        self._inbox.expect_no_more()
        self._hang_up()

    def _on_failure(self) -> None:
        self._outbox.fail()
        self._inbox.stop()
        self._hang_up()

    def _sending_lost(self, reason: str) -> None:
        """The peer has ended reading. Messages that it sent before are kept."""
        self._lifecycle.lose_peer(reason)
        self._outbox.fail()

    def _hang_up(self) -> None:
        """Shut the connection down, so that a peer that was only silent or stopped notices the end."""
        with self._closing, contextlib.suppress(OSError):
            if not self._let_go:
                self._control.sock.shutdown(socket.SHUT_RDWR)


def _span_of(blocks: Blocks) -> Span | None:
    """Describe the blocks for the compiled steps; ``None`` if those cannot copy them.

    Raises UnsupportedError: they are not in CPU memory.
    """
    if blocks.device.type != "cpu":
        raise UnsupportedError(f"the pipe 'shm' moves blocks of CPU tensors, not of {blocks.device} ones")
    return Span.of_blocks(blocks)
