"""The receiving half of a pipe: what was announced, and the one message that is being received.

Nothing is received before somebody calls: a receiver that stops holds a window of announcements, and no
memory. Where the caller's memory is received into, and the call runs out of time in the middle of a message,
that memory is taken back by an abort of the communicator, which is the end of the pipe. So calls with little
time go through memory of our own, where the next one finds the rest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvplug import KvplugError, TimeoutError, TransportError
from kvplug.transport import Deadline, Lifecycle, WireError
from kvplug_pynccl.device import Device, Event
from kvplug_pynccl.operation import Operation
from kvplug_pynccl.pipe.content import Memory
from kvplug_pynccl.pipe.frames import WINDOW, Announcement, Frame, Kind
from kvplug_pynccl.pipe.targets import Target
from kvplug_pynccl.pipe.way import Way

if TYPE_CHECKING:
    from torch import Tensor

_DIRECT_S: Final = 1.0
"""The least time that a call must have left to receive into the caller's memory."""
_ABORT_PATIENCE_S: Final = 2.0
"""How long memory that was taken back is waited for; an abort takes no longer unless NCCL hangs."""


class _Reception:
    """A message under way. ``own`` is our memory; ``None``: it is the caller's."""

    def __init__(self, said: Announcement, memory: Memory, own: Tensor | None, ready: Event | None) -> None:
        self.said = said
        self.memory = memory
        self.own = own
        self.ready = ready
        self.operation: Operation | None = None
        self.done = False
        self.cut = False

    @property
    def over(self) -> bool:
        return self.done or self.cut


class Inbox:
    """``say`` queues a frame for the peer, ``wake`` wakes the pipe's thread, ``break_down`` ends the pipe."""

    def __init__(
        self,
        way: Way,
        device: Device,
        *,
        peer: str,
        check_order: bool,
        lifecycle: Lifecycle,
        say: Callable[[bytes], None],
        wake: Callable[[], None],
        break_down: Callable[[str], None],
    ) -> None:
        self._way = way
        self._device = device
        self._peer = peer
        self._check_order = check_order
        self._lifecycle = lifecycle
        self._say = say
        self._wake = wake
        self._break_down = break_down
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._announced: deque[Announcement] = deque()
        self._next = self._untaken = 0
        self._active: _Reception | None = None
        self._ended = False

    # -- callers ---------------------------------------------------------------------------------------

    def receive(self, target: Target, deadline: Deadline) -> Tensor | None:
        """Only one thread at a time. Raises as ``Pipe.recv_tensor``."""
        reception = self._active
        if reception is not None and reception.own is None:
            self._break_down("a receive into the caller's memory was interrupted")
            raise self._lifecycle.error()
        if reception is None:
            said = self._first(deadline)
            target.check(said.meta)
            if said.meta is None or not said.nbytes:
                value = None if said.meta is None else target.empty(said.meta)
                self._take_empty(said)
                return value
            reception = self._prepared(said, target, deadline)
        else:
            target.check(reception.said.meta)
        self._wait(reception, deadline)
        value = target.value(reception.own, deadline)
        self._active = None
        return value

    def wake_callers(self) -> None:
        """It has ended: whoever waits looks at it. Blocks nowhere."""
        with self._lock:
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more is received."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()

    def _first(self, deadline: Deadline) -> Announcement:
        with self._lock:
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

    def _take_empty(self, said: Announcement) -> None:
        try:
            with self._lock:
                self._check()
                self._announced.popleft()
                self._untaken -= 1
                self._say(Frame(Kind.TAKEN, said.number).pack())
        except KvplugError:
            raise
        except BaseException:  # Ctrl-C: nobody knows how far it got
            self._break_down("interrupted while a message was received")
            raise

    def _prepared(self, said: Announcement, target: Target, deadline: Deadline) -> _Reception:
        left = deadline.remaining()
        memory = target.memory(said.pieces) if left is None or left >= _DIRECT_S else None
        own = None
        if memory is None:
            assert said.meta is not None
            own = self._device.empty(said.meta)
            memory = Memory.of(own, said.pieces)
        return _Reception(said, memory, own, self._device.now())

    def _wait(self, reception: _Reception, deadline: Deadline) -> None:
        try:
            if self._active is None:
                with self._lock:
                    self._check()
                    self._active = reception
                self._wake()
            with self._lock:
                while not reception.done:
                    self._check()
                    if not self._changed.wait(deadline.remaining()) and deadline.expired:
                        raise TimeoutError(self._late(reception))
        except BaseException as e:
            if reception is self._active and reception.own is None and not self._take_back(reception, e):
                return
            raise

    def _take_back(self, reception: _Reception, error: BaseException) -> bool:
        """The caller's memory, which is the caller's again now. False: the message is all there."""
        with self._lock:
            if reception.done and isinstance(error, KvplugError):
                return False
            reception.cut = True
            if reception.operation is None:  # the peer was not told: the message stays
                self._active = None
                return True
        if isinstance(error, TimeoutError):
            self._break_down("a receive into the caller's memory ran out of time in the middle of a message")
        elif not self._lifecycle.ended:
            self._break_down("a receive into the caller's memory was interrupted")
        over = self._way.comm.abort(reception.memory)
        if not over.wait(_ABORT_PATIENCE_S):
            raise TransportError(
                "NCCL does not end the transfer that was aborted: the memory that was given as out= may still"
                " be written to"
            ) from error
        return True

    def _late(self, reception: _Reception) -> str:
        """Locked."""
        nbytes = reception.said.nbytes
        if reception.operation is None:
            reception.cut = reception.own is None  # nobody begins with it any more
            return (
                f"the device has not done with the memory that a tensor of {nbytes} bytes from {self._peer}"
                " is to be received into; the message stays"
            )
        goes_on = "the pipe is broken" if reception.own is None else "the next call goes on with it"
        return f"a tensor of {nbytes} bytes has not wholly arrived from {self._peer} in time; {goes_on}"

    # -- the pipe's thread -----------------------------------------------------------------------------

    @property
    def in_use(self) -> object:
        """What the device writes to at this moment."""
        return self._active

    def announce(self, frame: Frame) -> None:
        """The peer has a message.

        Raises:
            WireError: it contradicts itself, or has announced more than it may.
        """
        said = Announcement.read(frame)
        with self._lock:
            if said.number != self._next:
                raise WireError(f"it announces message {said.number}, and message {self._next} is next")
            if self._untaken >= WINDOW:
                raise WireError(f"it announces more than {WINDOW} messages that were not taken")
            self._next += 1
            self._untaken += 1
            self._announced.append(said)
            self._changed.notify_all()

    def step(self) -> bool:
        """Do what can be done now. Whether the device is at work for it."""
        reception = self._active
        if reception is None or reception.over:
            return False
        if reception.operation is None:
            if reception.ready is not None and not reception.ready.is_done():
                return True  # the peer's GPU would wait for ours
            operation = self._way.receiving(reception.memory, reception.ready)
            with self._lock:
                if reception.cut:
                    return False
                reception.operation = operation
            expected = reception.said.prefix if self._check_order else b""
            self._say(Frame(Kind.CLEAR, reception.said.number, expected).pack())
        if not reception.operation.step():
            return True
        with self._lock:
            if reception.cut:
                return False
            reception.done = True
            self._announced.popleft()
            self._untaken -= 1
            # Before the caller goes on: it says the same of the next one itself, if that has no bytes.
            self._say(Frame(Kind.TAKEN, reception.said.number).pack())
            self._changed.notify_all()
        return False
