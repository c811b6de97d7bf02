"""A large tensor that is not put into the ring: only where it lies is, and the peer copies it from there.

The prefix of such a message has a flag, and after it there is a line with the address. Nothing goes into the
ring after that line until the peer has given it back: from then on the tensor is the caller's again. Whoever
takes an offer back evicts the reader first, and the reader looks for that after it has copied and before it
believes the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import attrs

from kvplug.net.wire.messages import tensor_prefix
from kvplug_shm.memory.attach import PeerMemory
from kvplug_shm.memory.huge_pages import in_huge_pages
from kvplug_shm.pipe.announcement import OFFERED, address_line
from kvplug_shm.pipe.content import Content
from kvplug_shm.pipe.message import Message, NotTakenError, Step
from kvplug_shm.pipe.rings import Outgoing, Pieces, lines

if TYPE_CHECKING:
    from torch import Tensor

OFFERED_FROM: Final = 1024 * 1024
"""Bytes from which on it is worth the peer's turning to the kernel."""


@attrs.frozen
class SingleCopy:
    """What one end of a pipe may do without the ring."""

    theirs: PeerMemory | None = None
    """Where the tensors lie that the peer offers; ``None``: it may offer none."""
    ours: bool = False
    """Whether the peer can read our memory."""


class Offer(Message):
    """A tensor that the peer copies itself. Done is what the peer has given the line of."""

    __slots__ = ("_prefix",)

    def __init__(self, tensor: Tensor) -> None:
        """Of one whose bytes lie in memory as they are sent. Raises UnsupportedError: its dtype."""
        content = Content(tensor)
        super().__init__(content)
        prefix = tensor_prefix(tensor.dtype, tensor.shape, content.nbytes, OFFERED)
        self._prefix = prefix.ljust(lines(len(prefix)), b"\0") + address_line(content.address)

    def least(self, ring: Outgoing) -> int:
        return ring.nbytes if self.announced else len(self._prefix)

    def push(
        self,
        ring: Outgoing,
        pieces: Pieces,
        publish: Callable[[Outgoing, int], bool],
        *,
        patient: bool = True,
    ) -> bool:
        """Announce it, then see whether it was taken."""
        end = ring.end
        over = end.over(0)
        room = end.room()  # raises
        if self.announced:
            if end.lag(0) == 0:
                self.done = self.content.nbytes
                return True
            if over:
                raise NotTakenError
            return False
        if over:
            raise NotTakenError
        if room < len(self._prefix):
            return False
        if self.step is Step.HELD:
            self.step = Step.TOUCHED
        ring.write(end.sent, self._prefix)
        if not publish(ring, len(self._prefix)):
            return False
        self.announced = True
        return True


def worth_offering(tensor: Tensor) -> bool:
    """Whether the kernel copies it faster than the ring does: a large one in huge pages.

    Of one whose bytes lie in memory as they are sent. With small pages the kernel looks each of them up.
    """
    return tensor.nbytes >= OFFERED_FROM and in_huge_pages(tensor.data_ptr(), tensor.nbytes)
