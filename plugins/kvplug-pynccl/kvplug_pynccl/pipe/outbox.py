"""The sending half of a pipe: what is queued, what the peer knows of, and what it has cleared.

    queued -> made -> announced -> cleared by the peer -> under way -> sent, and taken by the peer

Messages go through these states in order. One is made when the device has done what its content comes from:
announced before, it would have the peer's GPU wait for ours. The memory of one is the caller's again when it
was sent and taken, or when the copy of it was made: whoever ends the pipe once a transfer is done cuts off
nothing that the peer is still receiving. Callers queue; everything else is done by the pipe's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvplug import KvplugError, TimeoutError
from kvplug.net.wire.messages import read_prefix
from kvplug.transport import Deadline, Lifecycle, Transfer, WireError
from kvplug_pynccl.operation import Operation
from kvplug_pynccl.pipe.content import Content
from kvplug_pynccl.pipe.frames import WINDOW, Announcement, Frame
from kvplug_pynccl.pipe.way import Way

logger = logging.getLogger(__name__)

_PAUSE_S = 0.001

_SMALLEST_COST = 256
"""What an empty message counts for, so that a stopped receiver bounds their number too."""


class _Message:
    __slots__ = ("cleared", "content", "cost", "made", "number", "operation", "sent", "taken", "transfer")

    def __init__(self, number: int, content: Content) -> None:
        self.number = number
        self.content = content
        self.cost = max(_SMALLEST_COST, content.nbytes)
        self.transfer = Transfer(content.nbytes)
        self.operation: Operation | None = None
        self.made = self.cleared = False
        self.sent = content.memory is None
        self.taken = False

    @property
    def pieces(self) -> int:
        memory = self.content.memory
        return 1 if memory is None else len(memory.addresses)


class Outbox:
    """``say`` queues a frame for the peer, ``wake`` wakes the pipe's thread, ``break_down`` ends the pipe.

    The last is called without locks.
    """

    def __init__(
        self,
        way: Way,
        *,
        peer: str,
        limit: int,
        lifecycle: Lifecycle,
        say: Callable[[bytes], None],
        wake: Callable[[], None],
        break_down: Callable[[str], None],
    ) -> None:
        self._way = way
        self._peer = peer
        self._limit = limit
        self._lifecycle = lifecycle
        self._say = say
        self._wake = wake
        self._break_down = break_down
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._held: dict[int, _Message] = {}
        """By number; from queued until sent and taken."""
        self._in_flight = 0
        self._next = self._announced = self._taken = 0
        """Numbers of the message that is queued, announced, and taken next."""
        self._making: deque[_Message] = deque()
        self._cleared: deque[_Message] = deque()
        self._active: _Message | None = None
        self._ended = False

    # -- callers ---------------------------------------------------------------------------------------

    def send(self, content: Content, deadline: Deadline) -> Transfer:
        """Only one thread at a time. Raises as ``Pipe.send_tensor``."""
        room = False
        try:
            with self._lock:
                message = _Message(self._next, content)
                self._wait_for_room(message, deadline)
                room = True
                self._queue(message)
        except BaseException:
            if room:  # Ctrl-C: nobody knows how far it got
                self._break_down("interrupted while a message was queued")
            raise
        if not message.made:
            self._wake()
        elif content.owned:
            message.transfer.finish()
        return message.transfer

    def drain(self, deadline: Deadline) -> None:
        """Refuse whoever waits for room, then wait until all was taken, or it has ended."""
        with self._lock:
            self._room.notify_all()
            while self._held and not self._ended:
                if not self._room.wait(deadline.remaining()) and deadline.expired:
                    return

    def end(self) -> None:
        """It has ended: whoever waits looks at it. Blocks nowhere."""
        with self._lock:
            self._ended = True
            self._room.notify_all()

    def fail(self) -> None:
        """Everything that is not sent and taken fails with how it ended; what is done stays so."""
        with self._lock:
            self._ended = True
            lost = list(self._held.values())
            self._held.clear()
            self._making.clear()
            self._cleared.clear()
            self._active = None
            self._room.notify_all()
        for message in lost:
            try:
                message.transfer.fail(self._lifecycle.error())
            except BaseException:  # of a callback; the others are told, too
                logger.exception("a callback of %r ended it", message.transfer)

    def inherit(self) -> None:
        """This is a forked child: its parent's transfers end here too. Takes no lock."""
        for message in list(self._held.values()):
            message.transfer.after_fork(self._lifecycle.error())

    def _wait_for_room(self, message: _Message, deadline: Deadline) -> None:
        while True:
            if self._lifecycle.ended or self._ended:
                raise self._lifecycle.error()
            if not self._in_flight or self._in_flight + message.cost <= self._limit:
                return
            if not self._room.wait(deadline.remaining()) and deadline.expired:
                raise TimeoutError(
                    f"{self._peer} has not taken the {self._in_flight} bytes that are queued for it;"
                    f" there was no room for {message.transfer.nbytes} more (max_in_flight_bytes is"
                    f" {self._limit}), and nothing was queued"
                )

    def _queue(self, message: _Message) -> None:
        message.made = not self._making and message.content.is_made()
        if not message.made:
            self._making.append(message)
        self._held[message.number] = message
        self._next += 1
        self._in_flight += message.cost
        self._announce()

    def _announce(self) -> None:
        while self._announced < self._next and self._announced - self._taken < WINDOW:
            message = self._held[self._announced]
            if not message.made:
                return
            self._announced += 1
            self._say(Announcement(message.number, message.content.prefix, None, message.pieces).pack())

    # -- the pipe's thread -----------------------------------------------------------------------------

    @property
    def in_use(self) -> object:
        """What the device reads at this moment."""
        return self._active

    def clear(self, frame: Frame) -> None:
        """The peer is ready for a message.

        Raises:
            WireError: not for that one; or, where it says what it expects, for something else.
        """
        message = self._held.get(frame.number)
        if (
            frame.number != self._taken
            or frame.number >= self._announced
            or message is None
            or message.cleared
            or message.content.memory is None
        ):
            raise WireError(f"it is ready for message {frame.number}, and message {self._taken} is next")
        if frame.payload and frame.payload != message.content.prefix:
            ours, theirs = read_prefix(message.content.prefix).meta, read_prefix(frame.payload).meta
            raise WireError(
                f"the ends disagree: this one is about to send {ours} as message {frame.number}, and the"
                f" other to receive {theirs} (check_order)"
            )
        message.cleared = True
        self._cleared.append(message)

    def take(self, frame: Frame) -> None:
        """The peer has a message. Raises WireError: it cannot."""
        message = self._held.get(frame.number)
        if (
            frame.number != self._taken
            or frame.number >= self._announced
            or message is None
            or not (message.sent or message.operation)
        ):
            raise WireError(f"it says that it has message {frame.number}, which was not sent")
        message.taken = True
        with self._lock:
            self._taken += 1
            self._announce()
        self._settle(message)

    def step(self) -> bool:
        """Do what can be done now. Whether the device is at work for it."""
        while self._making and self._making[0].content.is_made():
            with self._lock:
                message = self._making.popleft()
                message.made = True
                self._announce()
            if message.content.owned:
                message.transfer.finish()
        if self._active is None and self._cleared:
            self._active = self._cleared.popleft()
        active = self._active
        if active is not None:
            if active.operation is None:
                content = active.content
                assert content.memory is not None
                active.operation = self._way.sending(content.memory, content.ready)
            if active.operation.step():
                active.sent = True
                self._active = None
                self._settle(active)
        return bool(self._making or self._active or self._cleared)

    def settle_taken(self, deadline: Deadline) -> None:
        """The peer is gone. What is under way and was taken ends by itself, soon."""
        message = self._active
        while message is not None and message.taken and not message.sent and not deadline.expired:
            try:
                self.step()
            except KvplugError:
                return
            time.sleep(_PAUSE_S)

    def _settle(self, message: _Message) -> None:
        if not (message.sent and message.taken):
            return
        with self._lock:
            if self._held.pop(message.number, None) is None:
                return
            self._in_flight -= message.cost
            self._room.notify_all()
        message.transfer.finish()
