"""An arriving message: its announcement is read from checked copies, since the peer could change the ring."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvplug.net.wire.messages import SHORTEST_TENSOR_PREFIX, prefix_size, read_prefix
from kvplug.net.wire.tensors import TensorMeta, dtype_of
from kvplug.transport import PartialMessage, WireError
from kvplug_shm.pipe.geometry import LINE, lines
from kvplug_shm.pipe.rings import Incoming

if TYPE_CHECKING:
    import torch


class Arrival(PartialMessage):
    """A message whose announcement was read. The prefix stays in the ring until the first bytes are taken."""

    __slots__ = ("unreleased",)

    def __init__(self, meta: TensorMeta | None, unreleased: int) -> None:
        super().__init__(meta)
        self.unreleased = unreleased
        """Bytes of the ring that were read and not released: the prefix."""

    @classmethod
    def read(cls, ring: Incoming, wait: Callable[[int], bool]) -> Arrival | None:
        """Return the message whose first line is in the ring.

        ``wait(count)``: waits for that many bytes; False at the deadline, and then this returns ``None``.

        Raises:
            WireError, UnsupportedError: the message cannot be received here.
        """
        _, line = ring.next_line()
        small = small_in(line)
        if small is not None:
            return cls(small[0], LINE)
        size = prefix_size(line[:SHORTEST_TENSOR_PREFIX])
        padded = lines(size)
        if not wait(padded):
            return None
        return cls(_meta_in(ring.peek(size)), padded)


@functools.lru_cache(1024)
def small_in(line: bytes) -> tuple[TensorMeta | None, torch.dtype | None, int] | None:
    """The announcement in the first line of a message, if the whole prefix fits the line.

    Raises:
        WireError, UnsupportedError: the message cannot be received here.
    """
    # A pipe sees the same few shapes over and over.
    size = prefix_size(line[:SHORTEST_TENSOR_PREFIX])
    if size > LINE:
        return None
    meta = _meta_in(line[:size])
    return meta, None if meta is None else dtype_of(meta.dtype), 0 if meta is None else meta.nbytes


def _meta_in(prefix: bytes) -> TensorMeta | None:
    """The meta in a whole prefix; ``None`` for the message ``None``.

    Raises:
        WireError: it is not the prefix of a message of this pipe.
    """
    announcement = read_prefix(prefix)
    if announcement.goodbye or announcement.flags:
        raise WireError("a frame that this pipe does not use")
    return announcement.meta
