"""One message on its way into the ring."""

from __future__ import annotations

import enum

from kvplug.transport import Transfer
from kvplug_shm.pipe.content import Content


class Progress(enum.Enum):
    """The progress of a message through the outbox."""

    NEW = enum.auto()
    ADMITTED = enum.auto()
    """The window has room for it."""
    TOUCHED = enum.auto()
    """Its sender writes it into the ring."""
    QUEUED = enum.auto()
    """The writer thread writes it."""
    OVER = enum.auto()


class Message:
    """A content, and how much of it is in the ring."""

    __slots__ = ("announced", "content", "cost", "done", "progress", "transfer")

    def __init__(self, content: Content, cost: int) -> None:
        """``cost``: the bytes by which it counts in the window."""
        self.content = content
        self.cost = cost
        self.progress = Progress.NEW
        self.announced = False
        """Its prefix is in the ring."""
        self.done = 0
        """Bytes of the tensor that are in the ring."""
        self.transfer = Transfer(content.nbytes)

    @property
    def complete(self) -> bool:
        """Whether all of it is in the ring."""
        return self.announced and self.done == self.content.nbytes
