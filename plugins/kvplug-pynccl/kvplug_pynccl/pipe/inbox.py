"""The receiving half of a pipe: what was announced, and the one message that is being received.

Nothing is received before a caller asks for it: a receiver that stops holds a window of announcements, and no
memory. Where the caller's memory is received into, and the call runs out of time in the middle of a message,
that memory is taken back by an abort of the communicator, which is the end of the pipe. So calls with little
time left receive into memory of the pipe's, and the next call goes on with that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvplug import KvplugError, TimeoutError, TransportError
from kvplug.transport import Deadline, Lifecycle, MessageLimit, PartialMessage, WireError
from kvplug_pynccl.device import Device, Event
from kvplug_pynccl.operation import Operation
from kvplug_pynccl.pipe.content import Memory
from kvplug_pynccl.pipe.direction import Direction
from kvplug_pynccl.pipe.frames import WINDOW, Announcement, Frame, FrameType
from kvplug_pynccl.pipe.targets import Target

if TYPE_CHECKING:
    from torch import Tensor

_DIRECT_S: Final = 1.0
"""The least time that a call must have left to receive into the caller's memory."""
_ABORT_WAIT_S: Final = 2.0
"""How long to wait for memory that was taken back; an abort takes no longer unless NCCL hangs."""


class _Reception:
    """A message that is being received. ``own`` is memory of the pipe's; ``None``: it is the caller's."""

    def __init__(
        self, announcement: Announcement, memory: Memory, own: Tensor | None, ready: Event | None
    ) -> None:
        self.announcement = announcement
        self.memory = memory
        self.own = own
        self.ready = ready
        self.operation: Operation | None = None
        self.done = False
        self.cancelled = False

    @property
    def over(self) -> bool:
        return self.done or self.cancelled


class Inbox:
    """``fail_pipe`` is called without locks, and calls :meth:`end`."""

    def __init__(
        self,
        direction: Direction,
        device: Device,
        *,
        peer: str,
        message_limit: MessageLimit,
        check_order: bool,
        lifecycle: Lifecycle,
        send_frame: Callable[[bytes], None],
        wake_worker: Callable[[], None],
        fail_pipe: Callable[[str], None],
    ) -> None:
        self.direction = direction
        self._device = device
        self._peer = peer
        self._limit = message_limit
        self._check_order = check_order
        self._lifecycle = lifecycle
        self._send_frame = send_frame
        self._wake_worker = wake_worker
        self._fail_pipe = fail_pipe
        self.lock = threading.RLock()  # also for the handler of a signal, which may abort the pipe
        self._changed = threading.Condition(self.lock)
        self._announced: deque[Announcement] = deque()
        self._next = self._untaken = 0
        self._active: _Reception | None = None
        self._ended = False

    # -- callers ---------------------------------------------------------------------------------------

    def receive(self, target: Target, deadline: Deadline) -> Tensor | None:
        """The next message. Only one thread at a time. Raises as ``Pipe.recv_tensor``."""
        reception = self._active
        if reception is not None and reception.own is None:
            self._fail_pipe(PartialMessage.INTERRUPTED)
            raise self._lifecycle.error()
        if reception is None:
            announcement = self._first(deadline)
            target.check(announcement.meta)
            if announcement.meta is None or not announcement.nbytes:
                value = None if announcement.meta is None else target.empty(announcement.meta)
                self._take_empty(announcement)
                return value
            reception = self._prepare(announcement, target, deadline)
        else:
            target.check(reception.announcement.meta)
        self._wait(reception, deadline)
        value = target.value(reception.own, deadline)
        self._active = None
        return value

    def wake_callers(self) -> None:
        """The pipe is closing: a caller that waits looks at the lifecycle again. Does not block."""
        with self.lock:
            self._changed.notify_all()

    def end(self) -> None:
        """Receive nothing more, and wake the caller. Does not block."""
        with self.lock:
            self._ended = True
            self._changed.notify_all()

    def _first(self, deadline: Deadline) -> Announcement:
        with self.lock:
            while not self._announced:
                self._check()
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    raise TimeoutError(
                        f"no message has arrived from {self._peer}; it is alive as far as can be seen"
                    )
            self._check()
            return self._announced[0]

    def _check(self) -> None:
        if self._ended or self._lifecycle.ended:
            raise self._lifecycle.error()

    def _take_empty(self, announcement: Announcement) -> None:
        try:
            with self.lock:
                self._check()
                self._take(announcement)
        except KvplugError:
            raise
        except BaseException:  # Ctrl-C: part of the state may have changed
            self._fail_pipe(PartialMessage.INTERRUPTED)
            raise

    def _take(self, announcement: Announcement) -> None:
        """With the lock."""
        self._announced.popleft()
        self._untaken -= 1
        self._send_frame(Frame(FrameType.TAKEN, announcement.number).pack())

    def _prepare(self, announcement: Announcement, target: Target, deadline: Deadline) -> _Reception:
        left = deadline.remaining()
        memory = target.memory(announcement.pieces) if left is None or left >= _DIRECT_S else None
        own = None
        if memory is None:
            assert announcement.meta is not None
            self._limit.check(announcement.nbytes, self._peer)
            own = self._device.empty(announcement.meta)
            memory = Memory.of(own, announcement.pieces)
        return _Reception(announcement, memory, own, self._device.now())

    def _wait(self, reception: _Reception, deadline: Deadline) -> None:
        try:
            if self._active is None:
                with self.lock:
                    self._check()
                    self._active = reception
                self._wake_worker()
            with self.lock:
                while not reception.done:
                    self._check()
                    if not self._changed.wait(deadline.remaining()) and deadline.expired:
                        raise self._late(reception)
        except BaseException as e:
            if reception is self._active and reception.own is None and not self._take_back(reception, e):
                return
            raise

    def _take_back(self, reception: _Reception, error: BaseException) -> bool:
        """Give the caller's memory back to the caller. False: the message has arrived in it meanwhile."""
        with self.lock:
            if reception.done and isinstance(error, KvplugError):
                return False
            reception.cancelled = True
            if reception.operation is None:  # the message was not cleared, so it stays
                self._active = None
                return True
        if isinstance(error, TimeoutError):
            self._fail_pipe("a receive into the caller's memory ran out of time in the middle of a message")
        elif not self._lifecycle.ended:
            self._fail_pipe(PartialMessage.INTERRUPTED)
        over = self.direction.comm.abort(reception.memory)
        if not over.wait(_ABORT_WAIT_S):
            raise TransportError(
                "NCCL does not end the transfer that was aborted: the memory that was given as out= may still"
                " be written to"
            ) from error
        return True

    def _late(self, reception: _Reception) -> TimeoutError:
        """With the lock: from here on the worker does not begin with a message that would be taken back."""
        nbytes = reception.announcement.nbytes
        if reception.operation is None:
            reception.cancelled = reception.own is None
            return TimeoutError(
                f"the device is still using the memory that a tensor of {nbytes} bytes from {self._peer}"
                " is to be received into; the message stays"
            )
        outcome = "the pipe is broken" if reception.own is None else "the next call goes on with it"
        return TimeoutError(
            f"a tensor of {nbytes} bytes has not wholly arrived from {self._peer} in time; {outcome}"
        )

    # -- the worker --------------------------------------------------------------------------------------

    @property
    def in_use(self) -> object:
        """What the device writes to at this moment."""
        return self._active

    def announce(self, frame: Frame) -> None:
        """The peer has a message.

        Raises:
            WireError: the announcement contradicts itself, or the peer has announced more than it may.
        """
        announcement = Announcement.unpack(frame)
        with self.lock:
            if announcement.number != self._next:
                raise WireError(
                    f"it announces message {announcement.number}, and message {self._next} is next"
                )
            if self._untaken >= WINDOW:
                raise WireError(f"it announces more than {WINDOW} messages that were not taken")
            self._next += 1
            self._untaken += 1
            self._announced.append(announcement)
            self._changed.notify_all()

    def step(self) -> bool:
        """Do what can be done now. Whether the device is at work for it."""
        reception = self._active
        if reception is None or reception.over:
            return False
        if reception.operation is None:
            if reception.ready is not None and not reception.ready.is_done():
                return True  # cleared now, the peer's GPU would wait for this one
            operation = self.direction.receive(reception.memory, reception.ready)
            with self.lock:
                if reception.cancelled:
                    return False
                reception.operation = operation
            expected = reception.announcement.prefix if self._check_order else b""
            self._send_frame(Frame(FrameType.CLEAR, reception.announcement.number, expected).pack())
        if not reception.operation.step():
            return True
        with self.lock:
            if reception.cancelled:
                return False
            reception.done = True
            # Before the caller goes on: it takes the next message itself, if that has no bytes.
            self._take(reception.announcement)
            self._changed.notify_all()
        return False
