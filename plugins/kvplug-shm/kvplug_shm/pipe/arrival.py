"""A message that arrives: what was said of it, and what it is received into when that is in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvplug import PeerGoneError
from kvplug.net.wire.messages import SHORTEST_TENSOR_PREFIX, prefix_size
from kvplug.net.wire.tensors import TensorMeta, dtype_of
from kvplug.transport import WireError
from kvplug_shm.memory.attach import LONGEST_BYTES, PeerMemory, UnreadableError
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.announcement import address_in, meta_in, small_in
from kvplug_shm.pipe.rings import LINE, Incoming, lines

if TYPE_CHECKING:
    from torch import Tensor


class Arrival:
    """A message whose announcement has been read: what it is, and how much of it has arrived."""

    __slots__ = ("dtype", "got", "meta", "nbytes", "offered_at", "own", "unreleased")

    def __init__(
        self,
        meta: TensorMeta | None,
        dtype: torch.dtype | None,
        nbytes: int,
        unreleased: int,
        offered_at: int = 0,
    ) -> None:
        self.meta = meta
        self.dtype = dtype
        self.nbytes = nbytes
        self.got = 0
        self.unreleased = unreleased
        """Bytes of the ring, before the tensor's, that were read and not given back: its prefix."""
        self.offered_at = offered_at
        """Where it lies in the peer, until the prefix is given back; 0: it comes through the ring."""
        self.own: Tensor | None = None
        """Our own memory, where a part of it waits for the next call."""

    def fetch(self, theirs: PeerMemory, memory: Flat, taken_back: Callable[[], bool]) -> None:
        """The next step of a tensor that is offered.

        What was copied is believed if the offer had not been ``taken_back`` by then.

        Raises:
            PeerGoneError: it had, or the peer has ended.
            WireError: what the peer offers cannot be read.
        """
        step = min(LONGEST_BYTES, self.nbytes - self.got)
        unreadable = None
        try:
            theirs.copy(self.offered_at + self.got, memory.address + self.got, step)
        except UnreadableError as e:
            unreadable = e
        if taken_back():
            raise PeerGoneError("it takes it back") from unreadable
        if unreadable is not None:
            raise WireError(f"a tensor is offered that cannot be read: {unreadable}") from unreadable
        self.got += step


class Flat:
    """What a message is received into: all in one piece."""

    def __init__(self, tensor: Tensor) -> None:
        self.address = tensor.data_ptr()
        self.span: Span | None = Span.flat(self.address)

    def take(self, ring: Incoming, count: int, done: int, nbytes: int) -> None:
        """``nbytes`` of the message, of which ``done`` were taken, from byte ``count`` of the stream on."""
        ring.copy(count, self.address + done, nbytes)


def announced(ring: Incoming, wait: Callable[[int], bool], *, offers: bool) -> Arrival | None:
    """The message of which the first line is in the ring.

    ``wait(count)``: whether so many bytes are there, in time. If they are not, it is none yet. ``offers``:
    whether the peer may offer a tensor.

    Raises:
        WireError, UnsupportedError: it is no message that can be received here.
    """
    _, line = ring.next_line()
    small = small_in(line)
    if small is not None:
        return Arrival(*small, LINE)
    size = prefix_size(line[:SHORTEST_TENSOR_PREFIX])
    padded = lines(size)
    if not wait(padded):
        return None
    meta, offered = meta_in(ring.peek(ring.end.read, size))
    if meta is None:
        return Arrival(None, None, 0, padded)
    if not offered:
        return Arrival(meta, dtype_of(meta.dtype), meta.nbytes, padded)
    if not offers:
        raise WireError("a tensor is offered, which was not agreed on")
    if not wait(padded + LINE):
        return None
    address = address_in(ring.peek(ring.end.read + padded, LINE))
    return Arrival(meta, dtype_of(meta.dtype), meta.nbytes, padded + LINE, address)
