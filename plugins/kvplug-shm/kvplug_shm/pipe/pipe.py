"""The pipe "shm": an outbox and an inbox over two rings of shared memory, and a watch on the peer."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Blocks,
    Connection,
    Deadline,
    ExclusiveUse,
    Heartbeat,
    Lifecycle,
    Pipe,
    Timeout,
    Transfer,
    close_after_fork,
    watch,
)
from kvplug_shm.memory.pool import Pool
from kvplug_shm.memory.segment import Segment
from kvplug_shm.native.library import Library
from kvplug_shm.pipe.blocks import BlockContent, BlockTarget
from kvplug_shm.pipe.content import Content, is_plain
from kvplug_shm.pipe.head import OF_NONE, head_of
from kvplug_shm.pipe.inbox import NOT_YET, Inbox
from kvplug_shm.pipe.message import Message
from kvplug_shm.pipe.native import incoming, outgoing
from kvplug_shm.pipe.outbox import Outbox
from kvplug_shm.pipe.rings import Pieces

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Tuning:
    """What a pipe needs to know beside its memory."""

    slots: int
    slot_bytes: int
    max_in_flight_bytes: int
    spin_s: float
    timeout_s: float
    heartbeat_timeout_s: float
    pool: Pool
    library: Library | None
    """The compiled steps, where they are used."""


@attrs.frozen(kw_only=True)
class Shared:
    """The memory of one pipe, which both ends have mapped."""

    segment: Segment
    ring_bytes: int
    """Of each of the two rings."""
    pieces: Pieces
    accepted: bool
    """Whether this is the accepting end, whose outgoing ring is the first."""


@attrs.frozen(kw_only=True)
class Held:
    """Bytes of memory that a pipe takes."""

    shared: int
    """Of the two rings; 0 once both have ended."""
    queued: int
    """Of tensors that were sent and are not in the ring: the sender's own memory."""
    idle: int
    """Kept for tensors that are received next. All pipes of the endpoint share these."""
    lent: int
    """Under tensors that were received and are still somewhere."""


class ShmPipe(Pipe):
    """One connection, which is only watched, and two rings.

    One thread at most, the writer, started by the first message that the ring has no room for, gone with the
    pipe. The process's liveness watcher looks at the peer.
    """

    def __init__(
        self,
        control: Connection,
        shared: Shared,
        tuning: Tuning,
        *,
        pidfd: int | None,
        heartbeat_interval_s: float | None,
    ) -> None:
        """Owns the connection and the peer's ``pidfd`` from here on.

        ``heartbeat_interval_s``: at least one of the two ends has no pidfd of the other, as both have
        found out, so both beat that often.
        """
        self._peer = control.describe
        self._timeout_s = tuning.timeout_s
        self._lifecycle = Lifecycle(f"the pipe to {self._peer}")
        self._control = control
        self._pool = tuning.pool
        self._native = tuning.library is not None
        self._closing = threading.RLock()  # also for the handler of a signal
        self._over = False
        self._sending, self._receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self._outbox = Outbox(
            outgoing(
                shared.segment, 0 if shared.accepted else 1, shared.ring_bytes, tuning.library, tuning.spin_s
            ),
            peer=self._peer,
            limit=tuning.max_in_flight_bytes,
            pieces=shared.pieces,
            spin_s=tuning.spin_s,
            lifecycle=self._lifecycle,
            lost=self._sending_lost,
            break_down=self._break_down,
        )
        self._inbox = Inbox(
            incoming(
                shared.segment, 1 if shared.accepted else 0, shared.ring_bytes, tuning.library, tuning.spin_s
            ),
            pool=tuning.pool,
            peer=self._peer,
            pieces=shared.pieces,
            spin_s=tuning.spin_s,
            lifecycle=self._lifecycle,
            lost=self._peer_gone,
            break_down=self._break_down,
        )
        close_after_fork(self)
        try:
            beat = None
            if heartbeat_interval_s is not None:
                beat = Heartbeat(
                    control.sock, interval_s=heartbeat_interval_s, timeout_s=tuning.heartbeat_timeout_s
                )
            self._watch = watch(
                pidfd=pidfd, sock=None if beat else control.sock, heartbeat=beat, on_gone=self._peer_gone
            )
        finally:
            if pidfd is not None:
                os.close(pidfd)  # the watch has its own

    def __repr__(self) -> str:
        state = "closed" if self._lifecycle.closed else "ended" if self._lifecycle.ended else "open"
        return f"<ShmPipe to {self._peer}, {state}>"

    @property
    def closed(self) -> bool:
        return self._lifecycle.closed

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def held(self) -> Held:
        """How much memory it takes, for whoever plans or watches that."""
        return Held(
            shared=self._outbox.ring_bytes + self._inbox.ring_bytes,
            queued=self._outbox.queued_bytes,
            idle=self._pool.idle_bytes,
            lent=self._pool.lent_bytes,
        )

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        if self._lifecycle.ended:
            raise self._lifecycle.error()
        with self._sending.taken():
            deadline = None if timeout is DEFAULT_TIMEOUT else Deadline.after(timeout)
            transfer = None
            if tensor is None:
                transfer = self._outbox.send_at_once(OF_NONE, 0)
            elif is_plain(tensor):
                head = head_of(tensor.dtype, tensor.shape)
                transfer = self._outbox.send_at_once(head, tensor.data_ptr())
            if transfer is None:
                message = Message(Content(tensor))
                transfer = self._outbox.send(message, deadline or Deadline.after(self._timeout_s))
            return transfer

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        # A peer that is gone may have left whole messages behind: only a pipe closed here is over.
        if self._lifecycle.closed or self._lifecycle.broken:
            raise self._lifecycle.error()
        with self._receiving.taken():
            deadline = None if timeout is DEFAULT_TIMEOUT else Deadline.after(timeout)
            plain = out is None or is_plain(out)
            patient = deadline is None or not deadline.expired
            tensor = self._inbox.receive_at_once(out, plain, patient)
            if tensor is NOT_YET:
                tensor = self._inbox.receive(out, plain, deadline or Deadline.after(self._timeout_s))
            return tensor

    def send_blocks(
        self, views: Sequence[Tensor], block_ids: Sequence[int], *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Transfer:
        if self._lifecycle.ended:
            raise self._lifecycle.error()
        with self._sending.taken():
            deadline = Deadline.after(timeout, self._timeout_s)
            return self._outbox.send(Message(BlockContent(Blocks(views, block_ids), self._pool)), deadline)

    def recv_blocks(
        self, views: Sequence[Tensor], block_ids: Sequence[int], *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> None:
        if self._lifecycle.closed or self._lifecycle.broken:
            raise self._lifecycle.error()
        with self._receiving.taken():
            blocks = Blocks(views, block_ids)
            blocks.check_distinct()
            target = BlockTarget(blocks, native=self._native)
            self._inbox.receive_blocks(target, Deadline.after(timeout, self._timeout_s))

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        if not self._lifecycle.close("is closed"):
            return
        try:
            self._inbox.stop()
            self._outbox.drain(deadline)
        finally:
            self._end()
        self._outbox.join()

    def abort(self) -> None:
        # Also ends a close() that is still draining in another thread.
        if self._lifecycle.close("was aborted") or not self._over:
            self._end()

    def _end(self) -> None:
        """Wake everybody, tell the peer, and let go of everything. Blocks nowhere."""
        self._outbox.fail()
        self._inbox.stop()
        self._watch.close()
        with self._closing:
            self._over = True
            self._control.close()

    def _after_fork_in_child(self) -> None:
        self._over = True
        self._lifecycle.after_fork()
        self._control.close()
        self._outbox.inherit()
        self._inbox.inherit()

    # -- bad news, from any thread -------------------------------------------------------------------

    def _peer_gone(self, reason: str) -> None:
        """What the peer has published can still be received: the pipe ends only after it."""
        if self._lifecycle.lose_peer(reason):
            logger.debug("%r: %s", self, reason)
        self._outbox.fail()
        self._inbox.expect_no_more()
        self._hang_up()

    def _sending_lost(self, reason: str) -> None:
        """The peer reads nothing more. What it sent before is not thrown away."""
        self._lifecycle.lose_peer(reason)
        self._outbox.fail()

    def _break_down(self, reason: str) -> None:
        if self._lifecycle.fail(reason):
            logger.warning("%r: %s", self, reason)
        self._outbox.fail()
        self._inbox.stop()
        self._hang_up()

    def _hang_up(self) -> None:
        """A peer that was only silent, or stopped, hears of it."""
        with self._closing, contextlib.suppress(OSError):
            if not self._over:
                self._control.sock.shutdown(socket.SHUT_RDWR)
