"""One message on its way into the ring, which takes it piece by piece."""

from __future__ import annotations

import enum
from collections.abc import Callable

from kvplug.transport import Transfer
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.content import Content
from kvplug_shm.pipe.native import NativeOutgoing
from kvplug_shm.pipe.rings import LINE, SMALLEST_COST, Outgoing, Pieces, lines


class NotTakenError(Exception):
    """The peer reads nothing more."""


class Step(enum.Enum):
    """How far a message is on its way through the outbox."""

    NEW = enum.auto()
    HELD = enum.auto()
    """There is room for it."""
    TOUCHED = enum.auto()
    """Its sender writes it into the ring."""
    QUEUED = enum.auto()
    """It is the writer's."""
    OVER = enum.auto()


class Message:
    __slots__ = ("announced", "content", "cost", "done", "step", "transfer")

    def __init__(self, content: Content) -> None:
        self.content = content
        self.cost = max(SMALLEST_COST, content.nbytes)
        self.step = Step.NEW
        self.announced = False
        self.done = 0
        """Bytes of the tensor that are in the ring."""
        self.transfer = Transfer(content.nbytes)

    @property
    def complete(self) -> bool:
        return self.announced and self.done == self.content.nbytes

    def least(self, ring: Outgoing) -> int:
        """Bytes of the ring that have to be free before another push makes sense."""
        return LINE if self.announced else len(self.content.head.prefix)

    def push(
        self,
        ring: Outgoing,
        pieces: Pieces,
        publish: Callable[[Outgoing, int], bool],
        *,
        patient: bool = True,
    ) -> bool:
        """Copy as much as there is room for, and publish it. Whether that was anything.

        A piece at most, or with the compiled steps as much as gets in without sleeping, where for room it is
        looked for a moment if ``patient``. ``publish`` says no where the message has failed meanwhile: its
        memory is the caller's again, and may be something else. The compiled steps see that in the ring's
        words. Only one thread at a time, and only for the oldest message.

        Raises:
            NotTakenError: nobody reads it.
            WireError: the peer says what no reader can have done.
        """
        end, content = ring.end, self.content
        room = end.room() & -LINE
        if room == ring.nbytes and end.over(0):
            raise NotTakenError
        prefix = b"" if self.announced else content.head.prefix
        taken = len(prefix)
        if room < (taken or LINE):
            return False
        span = content.span if isinstance(ring, NativeOutgoing) else None
        if span is not None:
            return self._push_natively(ring, span, prefix, pieces, patient)
        nbytes = min(pieces.next(self.done, content.nbytes - self.done), room - taken)
        if not taken and not nbytes:
            return False
        if self.step is Step.HELD:
            self.step = Step.TOUCHED
        if taken:
            ring.write(end.sent, prefix)
        if nbytes:
            content.copy(ring, end.sent + taken, self.done, nbytes)
        if not publish(ring, taken + lines(nbytes)):
            return False
        self.announced = True
        self.done += nbytes
        return True

    def _push_natively(
        self, ring: NativeOutgoing, span: Span, prefix: bytes, pieces: Pieces, patient: bool
    ) -> bool:
        if self.step is Step.HELD:
            self.step = Step.TOUCHED
        before = ring.end.sent
        self.done += ring.push(prefix, span, self.done, self.content.nbytes, pieces, patient=patient)
        if ring.end.sent == before:
            return False
        self.announced = True
        return True
