"""The fence of each end: a few bytes that the peer can read, and that change before memory is taken back.

NIXL does not know that an owner has taken memory back: a read afterwards returns whatever is there, and says
that it succeeded. So an end that has read a message reads the other's fence next. If that still is the number
which was agreed on when the pipe was made, the message was the peer's to the last byte.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from kvplug import PeerGoneError
from kvplug.net.wire.tensors import memory_of, memory_of_writable
from kvplug_nixl.agent import Agent, Read, Span

FENCE_BYTES: Final = 16


class OwnFence:
    """Memory of this end's, registered with its agent."""

    def __init__(self, agent: Agent) -> None:
        import torch

        self.number: Final = secrets.token_bytes(FENCE_BYTES)
        self._memory = torch.frombuffer(bytearray(self.number), dtype=torch.uint8)
        ((address, _, place),), _ = agent.hold([self._memory])
        self.place: Final = address, place
        """Address, and the number that NIXL knows it by."""

    def take_back(self) -> None:
        """The peer's reads count as failed from now on. Takes no lock; idempotent."""
        memory_of_writable(self._memory)[:] = bytes(FENCE_BYTES)


class PeerFence:
    """The other end's."""

    def __init__(self, agent: Agent, number: bytes, place: tuple[int, int]) -> None:
        import torch

        self._agent = agent
        self._number = number
        self._span: Span = (place[0], FENCE_BYTES, place[1])
        self._memory = torch.zeros(FENCE_BYTES, dtype=torch.uint8)
        self._pending: Read | None = None
        self._local, _ = agent.hold([self._memory])

    def check(self, wait: Callable[[Read], bool]) -> bool:
        """Whether it is known that the peer has taken nothing back; otherwise ask again.

        ``wait(read)``: until it is done, or there is no time left. A read that was not waited for is the one
        that the next call looks at: its answer must not be taken for that of a later one.

        Raises:
            PeerGoneError: it has, or is another process by now.
        """
        memory = memory_of_writable(self._memory)
        if self._pending is None:
            memory[:] = bytes(FENCE_BYTES)
            self._pending = self._agent.read(self._local, [self._span])
        if not wait(self._pending):
            return False
        self._pending = None
        if bytes(memory_of(self._memory)) != self._number:
            raise PeerGoneError("the peer has taken back the memory of a message while it was read")
        return True

    def forget(self) -> None:
        """The agent is about to be closed."""
        if self._pending is not None:
            self._pending.forget()
