"""An arriving message: its announcement, and the contiguous memory it is received into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvplug.net.wire.messages import SHORTEST_TENSOR_PREFIX, prefix_size
from kvplug.net.wire.tensors import TensorMeta
from kvplug.transport import PartialMessage
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.announcement import meta_in, small_in
from kvplug_shm.pipe.geometry import LINE, lines
from kvplug_shm.pipe.rings import Incoming

if TYPE_CHECKING:
    from torch import Tensor


class Arrival(PartialMessage):
    """A message whose announcement was read. The prefix stays in the ring until the first bytes are taken."""

    __slots__ = ("unreleased",)

    def __init__(self, meta: TensorMeta | None, unreleased: int) -> None:
        super().__init__(meta)
        self.unreleased = unreleased
        """Bytes of the ring that were read and not released: the prefix."""


class Flat:
    """Contiguous memory that a message is received into."""

    def __init__(self, tensor: Tensor) -> None:
        self.span = Span.flat(tensor.data_ptr())


def announced(ring: Incoming, wait: Callable[[int], bool]) -> Arrival | None:
    """The message whose first line is in the ring.

    ``wait(count)``: waits for that many bytes; False at the deadline, and then this returns ``None``.

    Raises:
        WireError, UnsupportedError: it is no message that can be received here.
    """
    _, line = ring.next_line()
    small = small_in(line)
    if small is not None:
        return Arrival(small[0], LINE)
    size = prefix_size(line[:SHORTEST_TENSOR_PREFIX])
    padded = lines(size)
    if not wait(padded):
        return None
    meta = meta_in(ring.peek(size))
    return Arrival(meta, padded)
