"""The bound of the messages that a pipe receives into memory of its own."""

from __future__ import annotations

import sys

from kvplug.net.memory.room import check_room


class MessageLimit:
    """The largest message for which a pipe takes memory. Checked before memory is asked for. Any thread.

    A peer announces a message's size before its bytes. What is received into the caller's memory has no
    bound.

    >>> limit = MessageLimit(1000)
    >>> limit.check(1000, "pid 7")
    >>> limit.check(1001, "pid 7")
    Traceback (most recent call last):
    kvplug.errors.CapacityError: the next message of pid 7, which stays, has 1001 bytes, and...
    """

    def __init__(self, most: int | None = None, *, device: str = "cpu") -> None:
        """``most`` is the context's ``max_message_bytes``; ``None``: what this process can have.

        ``device``: where the memory is. A device has no more than it has, and its allocator refuses the rest.
        """
        self._most = most
        self._on_host = device.partition(":")[0] == "cpu"

    @property
    def most(self) -> int:
        """The bound in bytes; very large if only the memory of the process or device is one."""
        return sys.maxsize if self._most is None else self._most

    @property
    def is_lowered(self) -> bool:
        """Whether there is another bound than the memory of the process or device."""
        return self._most is not None

    def lower(self, nbytes: int) -> None:
        """Accept no larger messages than of ``nbytes`` from now on."""
        self._most = min(self.most, nbytes)

    def check(self, nbytes: int, peer: str) -> None:
        """Raises CapacityError: the next message of ``peer`` has more bytes, and stays."""
        if self._most is not None or self._on_host:
            check_room(nbytes, f"the next message of {peer}, which stays,", self._most)
