"""A message that arrives: what was said of it, and what it is received into when that is in one piece."""

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
    """A message whose announcement has been read, and lies in the ring until the first bytes are taken."""

    __slots__ = ("unreleased",)

    def __init__(self, meta: TensorMeta | None, unreleased: int) -> None:
        super().__init__(meta)
        self.unreleased = unreleased
        """Bytes of the ring, before the tensor's, that were read and not given back: its prefix."""


class Flat:
    """What a message is received into: all in one piece."""

    def __init__(self, tensor: Tensor) -> None:
        self.address = tensor.data_ptr()
        self.span: Span | None = Span.flat(self.address)

    def take(self, ring: Incoming, count: int, done: int, nbytes: int) -> None:
        """``nbytes`` of the message, of which ``done`` were taken, from byte ``count`` of the stream on."""
        ring.copy(count, self.address + done, nbytes)


def announced(ring: Incoming, wait: Callable[[int], bool]) -> Arrival | None:
    """The message of which the first line is in the ring.

    ``wait(count)``: whether so many bytes are there, in time. If they are not, it is none yet.

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
    meta = meta_in(ring.peek(ring.end.read, size))
    return Arrival(meta, padded)
