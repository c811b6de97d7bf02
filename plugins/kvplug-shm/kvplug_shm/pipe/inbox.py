"""The receiving half of a pipe: headers are copied out and checked, tensors go straight into their memory.

Nothing is read before a ``recv_tensor``, so a receiver that stops also stops its sender. A message that is
interrupted by a deadline is resumed by the next call.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from kvplug import KvplugError, TimeoutError
from kvplug.net.wire.tensors import TensorMeta, dtype_name
from kvplug.transport import Blocks, Deadline, DuplexPipe, MessageLimit, PartialMessage, WireError
from kvplug_shm.memory.pool import Pool
from kvplug_shm.native.library import LONGEST_NS, in_ns
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.arrival import Arrival, small_in
from kvplug_shm.pipe.geometry import LINE, lines
from kvplug_shm.pipe.message import is_plain
from kvplug_shm.pipe.rings import Incoming

if TYPE_CHECKING:
    from torch import Tensor


class Answer(enum.Enum):
    """The marker for "no message", since ``None`` is a message."""

    NOT_YET = enum.auto()


NOT_YET: Final = Answer.NOT_YET

_T = TypeVar("_T")


class Inbox:
    """``lost(reason)``: nothing more arrives. ``fail_pipe(reason)``: the stream cannot be trusted.

    Both are called without locks.
    """

    def __init__(
        self,
        ring: Incoming,
        *,
        pool: Pool,
        peer: str,
        message_limit: MessageLimit,
        lifecycle: DuplexPipe.Lifecycle,
        lost: Callable[[str], None],
        fail_pipe: Callable[[str], None],
    ) -> None:
        self.ring: Incoming | None = ring
        """``None`` when it has ended."""
        self._pool = pool
        self._peer = peer
        self._limit = message_limit
        self._lifecycle = lifecycle
        self._lost = lost
        self._fail_pipe = fail_pipe
        self._message: Arrival | None = None
        self._reading = threading.Lock()
        """Held by the thread that reads the ring."""
        self._stopped = False
        self._no_more = False
        """Only a part of a message, or nothing, is left; an evicted peer may still write."""

    def receive_at_once(self, out: Tensor | None, patient: bool) -> Tensor | Literal[Answer.NOT_YET] | None:
        """A small message that has arrived and fits; ``NOT_YET``: leave it to :meth:`receive`.

        ``patient``: spin for it for a moment.
        """
        ring = self.ring
        if ring is None or self._message is not None or self._no_more:
            return NOT_YET
        try:
            with self._reading:
                return self._at_once(ring, out, ring.spin_s if patient else 0.0)
        except KvplugError:
            return NOT_YET  # receive raises it
        finally:
            if self._stopped:
                self._end_ring()

    def receive(self, out: Tensor | None, deadline: Deadline) -> Tensor | None:
        """Only one thread at a time. Raises as ``Pipe.recv_tensor``."""

        def read(ring: Incoming) -> Tensor | None:
            if self._message is None:
                tensor = self._at_once(ring, out, 0.0)
                if tensor is not NOT_YET:
                    return tensor
            return self._receive(ring, out, deadline)

        return self._reads(read, deadline, looked=True)

    @property
    def keeps_bytes(self) -> bool:
        """Whether a receive that ran out of time has kept the first bytes of the next message."""
        return self._message is not None and self._message.own is not None

    def receive_blocks(self, blocks: Blocks, span: Span, deadline: Deadline) -> None:
        """Receive into the blocks, whose memory ``span`` describes, unless :attr:`keeps_bytes`.

        Only one thread at a time. Raises as ``Pipe.recv_blocks``.
        """
        meta = TensorMeta(dtype_name(blocks.dtype), blocks.shape)

        def read(ring: Incoming) -> None:
            message = self._message
            if message is None:
                message = self._message = self._announced(ring, deadline)
            if message.meta != meta:
                raise meta.mismatch(message.meta, "the blocks are")
            try:
                if not self._fill(ring, message, span, deadline, blocks):
                    self._keep(message, blocks)
                    raise message.late(self._peer)
            except KvplugError:
                raise
            except BaseException:
                self._fail_pipe(PartialMessage.INTERRUPTED)
                raise
            self._message = None

        self._reads(read, deadline)

    def expect_no_more(self) -> None:
        """The peer is gone; published messages can still be received. Wakes the waiting thread."""
        ring = self.ring
        if ring is not None:
            ring.end.evict_writer()

    def stop(self) -> None:
        """End receiving. Wakes the waiting thread. Never blocks."""
        self._stopped = True
        self.expect_no_more()  # changes the word that is waited for
        self._end_ring()

    def after_fork(self) -> None:
        """This is a forked child. Takes no lock."""
        self._stopped, self.ring, self._message = True, None, None

    def _reads(self, read: Callable[[Incoming], _T], deadline: Deadline, *, looked: bool = False) -> _T:
        """Return ``read()`` once the beginning of a message, or more of the current one, is in the ring."""
        ring = self.ring
        if ring is None:
            raise self._lifecycle.error()
        try:
            with self._reading:
                if self._stopped or self._no_more:
                    raise self._lifecycle.error()
                looked = looked and in_ns(ring.spin_s) <= LONGEST_NS
                if self._message is None and not self._wait(ring, LINE, deadline, looked=looked):
                    raise TimeoutError(
                        f"no message has arrived from {self._peer}; it is alive as far as can be seen"
                    )
                return read(ring)
        except WireError as e:
            self._fail_pipe(f"what arrives is not a message: {e}")
            raise
        finally:
            if self._stopped:
                self._end_ring()

    def _end_ring(self) -> None:
        """Mark in the ring that nothing more is read. The last reading thread does it."""
        if self.ring is not None and self._reading.acquire(blocking=False):
            try:
                ring, self.ring = self.ring, None
                if ring is not None:
                    ring.end.end()
                    self._message = None
            finally:
                self._reading.release()

    def _at_once(
        self, ring: Incoming, out: Tensor | None, spin_s: float
    ) -> Tensor | Literal[Answer.NOT_YET] | None:
        plain = out is not None and is_plain(out)  # asked before the message arrives: takes most of 1 µs
        here, line = ring.next_line(spin_s)
        if here < LINE or self._stopped:
            return NOT_YET
        small = small_in(line)
        if small is None:
            return NOT_YET
        meta, dtype, nbytes = small
        taken = LINE + lines(nbytes)
        if here < taken or nbytes > ring.sizes.at_once:
            return NOT_YET
        if out is None:
            if nbytes > self._limit.most:
                return NOT_YET
            tensor = None if meta is None else self._pool.tensor(meta)
        elif plain and meta is not None and out.dtype is dtype and out.shape == meta.shape:
            tensor = out
        else:
            return NOT_YET
        try:
            ring.take(0 if tensor is None else tensor.data_ptr(), nbytes)
        except BaseException:
            self._fail_pipe(PartialMessage.INTERRUPTED)
            raise
        return tensor

    def _receive(self, ring: Incoming, out: Tensor | None, deadline: Deadline) -> Tensor | None:
        message = self._message
        if message is None:
            message = self._message = self._announced(ring, deadline)
        message.check_out(out)
        tensor = None
        if message.meta is not None:
            tensor = message.receive(
                out,
                allocate=self._pool.tensor,
                fill=lambda memory: self._fill(ring, message, Span.flat(memory.data_ptr()), deadline),
                fail=self._fail_pipe,
                peer=self._peer,
                limit=self._limit,
            )
        else:
            try:
                self._give_back(ring, message)
            except BaseException:
                self._fail_pipe(PartialMessage.INTERRUPTED)
                raise
        self._message = None
        return tensor

    def _keep(self, message: Arrival, blocks: Blocks) -> None:
        """Copy the bytes that have arrived out of the blocks, which are the caller's again."""
        if message.got:
            own = message.allocate_own(self._pool.tensor, self._fail_pipe)
            rows = own.view(blocks.num_rows, *blocks.row_shape)
            blocks.gather(0, rows[: -(-message.got // blocks.row_bytes)])
            message.own = own

    def _announced(self, ring: Incoming, deadline: Deadline) -> Arrival:
        """The first line has arrived: read the announcement."""
        message = Arrival.read(ring, lambda count: self._wait(ring, count, deadline))
        if message is None:
            raise TimeoutError(f"the announcement of a message from {self._peer} has not wholly arrived")
        return message

    def _fill(
        self, ring: Incoming, message: Arrival, span: Span, deadline: Deadline, blocks: Blocks | None = None
    ) -> bool:
        """Copy the tensor's bytes out of the ring; False at the deadline."""
        nbytes = message.nbytes
        while message.got < nbytes:
            if self._stopped:
                raise self._lifecycle.error()
            step = ring.pull(
                span,
                message.got,
                nbytes,
                message.unreleased,
                patient=not deadline.expired,
                enough=None if blocks is None else blocks.awaited_bytes,
            )
            if step:
                message.unreleased = 0
                message.got += step
                if blocks is not None:
                    blocks.arrived(message.got)
            elif not self._wait(ring, message.unreleased + LINE, deadline):
                return False
        if message.unreleased:
            self._give_back(ring, message)
        return True

    def _give_back(self, ring: Incoming, message: Arrival) -> None:
        count, message.unreleased = message.unreleased, 0
        ring.end.release(count)

    def _wait(self, ring: Incoming, count: int, deadline: Deadline, *, looked: bool = False) -> bool:
        """Wait until ``count`` bytes are in the ring; False at the deadline.

        ``looked``: the caller has already spun for them.

        Raises:
            PeerGoneError: they will never arrive.
            ClosedError, TransportError: the pipe was ended here meanwhile.
        """
        end, left = ring.end, deadline.remaining()
        spin_s = 0.0 if looked or left == 0.0 else ring.spin_s
        while not end.poll(count, spin_s):
            spin_s = 0.0
            if self._stopped:
                raise self._lifecycle.error()
            if end.writer_over(count):
                self._no_more = True
                is_whole = end.writer_ended and self._message is None
                self._lost(
                    DuplexPipe.Lifecycle.CLOSED_BY_PEER
                    if is_whole
                    else "it ended within a message, or is gone"
                )
                raise self._lifecycle.error()
            left = deadline.remaining()
            if left == 0.0:
                return False
            end.poll(count, nap_s=left)
        return True
