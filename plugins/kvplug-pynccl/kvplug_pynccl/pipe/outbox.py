"""The sending half of a pipe: what is queued, what the peer knows of, and what it has cleared.

    queued -> ready -> announced -> cleared by the peer -> being sent -> sent, and taken by the peer

Messages go through these states in order. One is ready when the device has written its content: announced
before, it would make the peer's GPU wait for this one. The memory of a message is the caller's again when it
was sent and taken, or when the copy of it was written: ending the pipe once a transfer is done cuts off
nothing that the peer is still receiving. Callers queue; everything else is done by the pipe's worker.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvplug import KvplugError
from kvplug.net.wire.messages import read_prefix
from kvplug.transport import Deadline, Lifecycle, PartialMessage, SendWindow, Transfer, WireError
from kvplug_pynccl.operation import Operation
from kvplug_pynccl.pipe.content import Content
from kvplug_pynccl.pipe.direction import Direction
from kvplug_pynccl.pipe.frames import WINDOW, Announcement, Frame

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 0.001


class _Message:
    __slots__ = ("cleared", "content", "cost", "number", "operation", "ready", "sent", "taken", "transfer")

    def __init__(self, number: int, content: Content, cost: int) -> None:
        self.number = number
        self.content = content
        self.cost = cost
        self.transfer = Transfer(content.nbytes)
        self.operation: Operation | None = None
        self.ready = self.cleared = False
        self.sent = content.memory is None
        self.taken = False

    @property
    def pieces(self) -> int:
        memory = self.content.memory
        return 1 if memory is None else len(memory.addresses)


class Outbox:
    """``fail_pipe`` is called without locks, and calls :meth:`end`."""

    def __init__(
        self,
        direction: Direction,
        *,
        peer: str,
        limit: int,
        lifecycle: Lifecycle,
        send_frame: Callable[[bytes], None],
        wake_worker: Callable[[], None],
        fail_pipe: Callable[[str], None],
    ) -> None:
        """``limit`` is the option ``max_in_flight_bytes``."""
        self.direction = direction
        self._lifecycle = lifecycle
        self._send_frame = send_frame
        self._wake_worker = wake_worker
        self._fail_pipe = fail_pipe
        self._window = SendWindow(limit=limit, peer=peer, lifecycle=lifecycle)
        self.lock = self._window.lock
        self._pending: dict[int, _Message] = {}
        """By number; from queued until sent and taken."""
        self._next = self._announced = self._taken = 0
        """Numbers of the message that is queued, announced, and taken next."""
        self._unready: deque[_Message] = deque()
        self._cleared: deque[_Message] = deque()
        self._active: _Message | None = None

    # -- callers ---------------------------------------------------------------------------------------

    def send(self, content: Content, deadline: Deadline) -> Transfer:
        """Queue a message. Only one thread at a time. Raises as ``Pipe.send_tensor``."""
        admitted = False
        try:
            with self.lock:
                self._window.wait_for_room(content.nbytes, deadline)
                admitted = True
                message = self._queue(content)
        except BaseException:
            if admitted:  # by Ctrl-C: part of the state may have changed
                self._fail_pipe(PartialMessage.INTERRUPTED)
            raise
        if not message.ready:
            self._wake_worker()
        elif content.owned:
            message.transfer.finish()
        return message.transfer

    def drain(self, deadline: Deadline) -> bool:
        """Refuse senders that wait for room, then wait until the peer has taken all, or the pipe ends.

        False: it has not taken all.
        """
        return self._window.drain(deadline)

    def end(self) -> None:
        """Accept nothing more, and wake every sender. Does not block."""
        with self.lock:
            self._window.end()

    def fail(self) -> None:
        """Fail everything that is not sent and taken with how the pipe ended; what is done stays done."""
        with self.lock:
            self._window.end()
            lost = list(self._pending.values())
            self._pending.clear()
            self._unready.clear()
            self._cleared.clear()
            self._active = None
        for message in lost:
            try:
                message.transfer.fail(self._lifecycle.error())
            except BaseException:  # of a callback; the other transfers must fail, too
                logger.exception("a callback of %r ended it", message.transfer)

    def _queue(self, content: Content) -> _Message:
        message = _Message(self._next, content, self._window.cost(content.nbytes))
        message.ready = not self._unready and content.is_ready()
        if not message.ready:
            self._unready.append(message)
        self._pending[message.number] = message
        self._next += 1
        self._window.add(message.cost)
        self._announce()
        return message

    def _announce(self) -> None:
        while self._announced < self._next and self._announced - self._taken < WINDOW:
            message = self._pending[self._announced]
            if not message.ready:
                return
            self._announced += 1
            self._send_frame(
                Announcement(message.number, message.content.prefix, None, message.pieces).pack()
            )

    # -- the worker --------------------------------------------------------------------------------------

    @property
    def in_use(self) -> object:
        """What the device reads at this moment."""
        return self._active

    def clear(self, frame: Frame) -> None:
        """The peer is ready for a message.

        Raises:
            WireError: it was not that message's turn; or the peer expects another one than this end sends.
        """
        message = self._pending.get(frame.number)
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
        """The peer has a message. Raises WireError: it cannot have it."""
        message = self._pending.get(frame.number)
        if (
            frame.number != self._taken
            or frame.number >= self._announced
            or message is None
            or not (message.sent or message.operation)
        ):
            raise WireError(f"it says that it has message {frame.number}, which was not sent")
        message.taken = True
        with self.lock:
            self._taken += 1
            self._announce()
        self._settle(message)

    def step(self) -> bool:
        """Do what can be done now. Whether the device is at work for it."""
        while self._unready and self._unready[0].content.is_ready():
            with self.lock:
                message = self._unready.popleft()
                message.ready = True
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
                active.operation = self.direction.send(content.memory, content.ready)
            if active.operation.step():
                active.sent = True
                self._active = None
                self._settle(active)
        return bool(self._unready or self._active or self._cleared)

    def finish_taken(self, deadline: Deadline) -> None:
        """The peer is gone. The operation of a message that it has taken ends without it, soon."""
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
        with self.lock:
            if self._pending.pop(message.number, None) is None:
                return
            self._window.settle(message.cost)
        message.transfer.finish()
