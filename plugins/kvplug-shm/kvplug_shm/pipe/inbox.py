"""The receiving half of a pipe: headers are copied out and checked, tensors go straight into their memory.

Nothing is read ahead of a ``recv_tensor``, so a receiver that stops bounds what its sender can get rid of. A
message that is interrupted by a deadline keeps its place.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import torch

from kvplug import KvplugError, TimeoutError
from kvplug.net.wire.messages import check_fits, is_dense
from kvplug.net.wire.tensors import copy_into, memory_of, memory_of_writable
from kvplug.transport import Deadline, Lifecycle, TensorMismatchError, WireError
from kvplug_shm.memory import waiting
from kvplug_shm.memory.pool import Pool
from kvplug_shm.pipe.announcement import small_in
from kvplug_shm.pipe.arrival import Arrival, Flat, announced
from kvplug_shm.pipe.blocks import BlockTarget
from kvplug_shm.pipe.native import NativeIncoming
from kvplug_shm.pipe.rings import LINE, LONGEST_LOOK_S, Incoming, Pieces, lines

if TYPE_CHECKING:
    from torch import Tensor


class Answer(enum.Enum):
    """What is no message, not even ``None``."""

    NOT_YET = enum.auto()


NOT_YET: Final = Answer.NOT_YET
_INTERRUPTED = "interrupted in the middle of a message"
"""Ctrl-C between a copy and our noting it: the stream's position is lost."""


_T = TypeVar("_T")


class Inbox:
    """``lost(reason)``: nothing more comes. ``break_down(reason)``: what comes cannot be trusted.

    Both are called without locks.
    """

    def __init__(
        self,
        ring: Incoming,
        *,
        pool: Pool,
        peer: str,
        pieces: Pieces,
        spin_s: float,
        lifecycle: Lifecycle,
        lost: Callable[[str], None],
        break_down: Callable[[str], None],
    ) -> None:
        self._ring: Incoming | None = ring
        self._pool = pool
        self._peer = peer
        self._pieces = pieces
        self._spin_s = spin_s
        self._lifecycle = lifecycle
        self._lost = lost
        self._break_down = break_down
        self._message: Arrival | None = None
        self._reading = threading.Lock()
        """Held by whoever reads the ring."""
        self._stopped = False
        self._no_more = False
        """A part of a message, or nothing, is all that is left; a peer that was given up may write on."""

    @property
    def ring_bytes(self) -> int:
        ring = self._ring
        return 0 if ring is None else ring.nbytes

    def receive_at_once(
        self, out: Tensor | None, plain: bool, patient: bool
    ) -> Tensor | Literal[Answer.NOT_YET] | None:
        """A small message that is here and fits; ``NOT_YET``: leave it to :meth:`receive`.

        ``plain``: no ``out``, or one whose bytes can be written as they come. ``patient``: it is
        looked for, for a moment.
        """
        ring = self._ring
        if ring is None or self._message is not None or self._no_more:
            return NOT_YET
        try:
            with self._reading:
                return self._at_once(ring, out, plain, self._spin_s if patient else 0.0)
        except KvplugError:
            return NOT_YET  # it is not better in a moment, and is said there
        finally:
            if self._stopped:
                self._say_that_it_stopped()

    def receive(self, out: Tensor | None, plain: bool, deadline: Deadline) -> Tensor | None:
        """Only one thread at a time. Raises as ``Pipe.recv_tensor``."""

        def read(ring: Incoming) -> Tensor | None:
            if self._message is None:
                tensor = self._at_once(ring, out, plain, 0.0)
                if tensor is not NOT_YET:
                    return tensor
            return self._receive(ring, out, plain, deadline)

        return self._reads(read, deadline, looked=self._spin_s <= LONGEST_LOOK_S)

    def receive_blocks(self, target: BlockTarget, deadline: Deadline) -> None:
        """Only one thread at a time. Raises as ``Pipe.recv_blocks``."""

        def read(ring: Incoming) -> None:
            message = self._message
            if message is None:
                message = self._message = self._announced(ring, deadline)
            meta = message.meta
            if meta != target.meta:
                came = "None" if meta is None else f"{meta.dtype} of shape {list(meta.shape)}"
                raise TensorMismatchError(
                    f"the next message is {came}, and the blocks are {target.meta.dtype} of shape"
                    f" {list(target.meta.shape)}; it stays"
                )
            try:
                self._scatter(ring, message, target, deadline)
            except KvplugError:
                raise
            except BaseException:
                self._break_down(_INTERRUPTED)
                raise
            self._message = None

        self._reads(read, deadline)

    def expect_no_more(self) -> None:
        """The peer is gone; what it has published can still be received. Wakes whoever waits."""
        ring = self._ring
        if ring is not None:
            ring.end.evict_writer()

    def stop(self) -> None:
        """Nothing is received any more. Wakes whoever waits, after it has ended. Blocks nowhere."""
        self._stopped = True
        self.expect_no_more()  # changes the word that is waited for
        self._say_that_it_stopped()

    def inherit(self) -> None:
        """This is a forked child. Takes no lock."""
        self._stopped, self._ring, self._message = True, None, None

    def _reads(self, read: Callable[[Incoming], _T], deadline: Deadline, *, looked: bool = False) -> _T:
        """What ``read`` returns, with the begin of a message in the ring, or the rest of one that is here."""
        ring = self._ring
        if ring is None:
            raise self._lifecycle.error()
        try:
            with self._reading:
                if self._stopped or self._no_more:
                    raise self._lifecycle.error()
                if self._message is None and not self._wait(ring, LINE, deadline, looked=looked):
                    raise TimeoutError(
                        f"no message has arrived from {self._peer}; it is alive as far as can be seen"
                    )
                return read(ring)
        except WireError as e:
            self._break_down(f"what arrives is not a message: {e}")
            raise
        finally:
            if self._stopped:
                self._say_that_it_stopped()

    def _say_that_it_stopped(self) -> None:
        """The peer is told by the last one out: whoever reads just now says it afterwards."""
        if self._ring is not None and self._reading.acquire(blocking=False):
            try:
                ring, self._ring = self._ring, None
                if ring is not None:
                    ring.end.end()
                    self._message = None
            finally:
                self._reading.release()

    def _at_once(
        self, ring: Incoming, out: Tensor | None, plain: bool, spin_s: float
    ) -> Tensor | Literal[Answer.NOT_YET] | None:
        here, line = ring.next_line(spin_s)
        if here < LINE or self._stopped:
            return NOT_YET
        small = small_in(line)
        if small is None:
            return NOT_YET
        meta, dtype, nbytes = small
        taken = LINE + lines(nbytes)
        if here < taken or nbytes > self._pieces.at_once:
            return NOT_YET
        if out is None:
            tensor = None if meta is None else self._pool.tensor(meta)
        elif meta is not None and plain and out.dtype is dtype and out.shape == meta.shape:
            tensor = out
        else:
            return NOT_YET
        try:
            ring.take(0 if tensor is None else tensor.data_ptr(), nbytes)
        except BaseException:
            self._break_down(_INTERRUPTED)
            raise
        return tensor

    def _receive(self, ring: Incoming, out: Tensor | None, plain: bool, deadline: Deadline) -> Tensor | None:
        message = self._message
        if message is None:
            message = self._message = self._announced(ring, deadline)
        meta = message.meta
        if meta is None:
            if out is not None:
                raise TensorMismatchError("the next message is None, and out= was given; it stays")
            try:
                self._give_back(ring, message)
            except BaseException:
                self._break_down(_INTERRUPTED)
                raise
            return None
        if out is not None and not (plain and out.dtype is message.dtype and out.shape == meta.shape):
            check_fits(out, meta)
        direct = message.own is None and out is not None and (plain or is_dense(out))
        if direct:
            tensor = out
        elif message.own is not None:
            tensor = message.own
        else:
            tensor = self._pool.tensor(meta)
        assert tensor is not None
        try:
            if not self._fill(ring, message, Flat(tensor), deadline):
                # Before anything is raised: what has arrived is part of what the next call returns.
                if direct:
                    self._keep(message, tensor)
                elif message.got:
                    message.own = tensor
                raise self._late(message)
        except KvplugError:
            raise
        except BaseException:
            self._break_down(_INTERRUPTED)
            raise
        if out is not None and not direct:
            message.own = tensor
            try:
                copy_into(out, memory_of(tensor))
            except RuntimeError as e:
                raise TensorMismatchError(f"out= cannot be written, and the message stays: {e}") from e
            tensor = out
        self._message = None
        return tensor

    def _scatter(self, ring: Incoming, message: Arrival, target: BlockTarget, deadline: Deadline) -> None:
        if message.own is not None:
            if self._fill(ring, message, Flat(message.own), deadline):
                target.fill(message.own)
                return
        elif self._fill(ring, message, target, deadline):
            return
        elif message.got:
            own = self._own(message)
            target.taken(own.view(-1).view(torch.uint8)[: message.got])
            message.own = own
        raise self._late(message)

    def _late(self, message: Arrival) -> TimeoutError:
        return TimeoutError(
            f"{message.got} of {message.nbytes} bytes of a tensor have arrived from {self._peer};"
            " the next call goes on with it"
        )

    def _keep(self, message: Arrival, tensor: Tensor) -> None:
        """Take what has arrived out of the caller's memory, which is the caller's again now."""
        if message.got:
            own = self._own(message)
            memory_of_writable(own)[: message.got] = memory_of(tensor)[: message.got]
            message.own = own

    def _own(self, message: Arrival) -> Tensor:
        """Memory for a part of a message that has arrived."""
        assert message.meta is not None
        try:
            return self._pool.tensor(message.meta)
        except BaseException:
            self._break_down("there was no memory for the part of a message that had arrived")
            raise

    def _announced(self, ring: Incoming, deadline: Deadline) -> Arrival:
        """A line of it is here."""
        message = announced(ring, lambda count: self._wait(ring, count, deadline))
        if message is None:
            raise TimeoutError(f"the announcement of a message from {self._peer} has not wholly arrived")
        return message

    def _fill(self, ring: Incoming, message: Arrival, memory: Flat | BlockTarget, deadline: Deadline) -> bool:
        """Have the tensor's bytes taken from where they lie; False at the deadline."""
        end, nbytes, piece = ring.end, message.nbytes, self._pieces.largest
        while message.got < nbytes:
            if self._stopped:
                raise self._lifecycle.error()
            if memory.span is not None and isinstance(ring, NativeIncoming):
                step = ring.pull(
                    memory.span,
                    message.got,
                    nbytes,
                    message.unreleased,
                    piece,
                    patient=not deadline.expired,
                )
                if step == 0:
                    end.available()  # raises, if what the writer says is why
            else:
                left = nbytes - message.got
                step = min(left, piece, end.available() - message.unreleased)
                if step < left:
                    step &= -LINE
                if step > 0:
                    memory.take(ring, end.read + message.unreleased, message.got, step)
                    end.release(message.unreleased + lines(step))
            if step > 0:
                message.unreleased = 0
                message.got += step
            elif not self._wait(ring, message.unreleased + LINE, deadline):
                return False
        if message.unreleased:
            self._give_back(ring, message)
        return True

    def _give_back(self, ring: Incoming, message: Arrival) -> None:
        count, message.unreleased = message.unreleased, 0
        ring.end.release(count)
        if message.meta is None:
            self._message = None

    def _wait(self, ring: Incoming, count: int, deadline: Deadline, *, looked: bool = False) -> bool:
        """Until ``count`` bytes are in the ring; False at the deadline.

        ``looked``: it was looked for them for a moment, and they were not there.

        Raises:
            PeerGoneError: they will never come.
            ClosedError, TransportError: it was ended here meanwhile.
        """
        end = ring.end
        if not looked and deadline.remaining() != 0.0 and end.spun(count, self._spin_s):
            return True
        while (awaited := end.awaited(count)) is not None:
            if self._stopped:
                raise self._lifecycle.error()
            if end.writer_over(count):
                self._no_more = True
                self._lost("the peer closed it")
                raise self._lifecycle.error()
            left = deadline.remaining()
            if left == 0.0:
                return False
            waiting.nap(end, awaited, left)
        return True
