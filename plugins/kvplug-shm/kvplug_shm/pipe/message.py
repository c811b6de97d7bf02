"""A message on its way into the ring: a header, then the tensor's bytes, both padded to a cache line."""

from __future__ import annotations

import ctypes
import enum
import functools
from typing import TYPE_CHECKING, Any, Final

import torch

from kvplug.net.wire.copying import address_of
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.net.wire.tensors import is_dense, memory_of
from kvplug.transport import Transfer
from kvplug_shm.native import library
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.geometry import LINE, SMALLEST_COST, lines

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class Header:
    """A prefix in whole cache lines, and what it announces. All messages of a dtype and shape share it."""

    __slots__ = ("_described", "cost", "nbytes", "pointer", "prefix")

    def __init__(self, prefix: bytes, nbytes: int) -> None:
        self.prefix = prefix.ljust(lines(len(prefix)), b"\0")
        self.nbytes = nbytes
        """Of the tensor."""
        self.cost = max(SMALLEST_COST, nbytes)
        """The bytes by which the message counts in the window."""
        self._described = library.MessageStruct(
            prefix=self.prefix, prefix_bytes=len(self.prefix), nbytes=nbytes, cost=self.cost
        )
        self.pointer = ctypes.c_void_p(ctypes.addressof(self._described))
        """The same, for the compiled steps."""


NONE_HEADER: Final = Header(NONE, 0)
assert len(NONE_HEADER.prefix) == LINE


@functools.lru_cache(1024)
def header_of(dtype: torch.dtype, shape: torch.Size) -> Header:
    """Raises UnsupportedError: the dtype is not carried."""
    # A pipe sees the same few shapes over and over.
    nbytes = shape.numel() * dtype.itemsize
    return Header(tensor_prefix(dtype, shape, nbytes), nbytes)


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
    """Its header, the tensor's memory, which it keeps alive, and how much of it is in the ring."""

    __slots__ = ("_owner", "announced", "done", "header", "progress", "span", "transfer")

    def __init__(self, header: Header, span: Span, owner: Any) -> None:
        self.header = header
        self.span = span
        """The memory, for the compiled steps."""
        self._owner = owner
        self.progress = Progress.NEW
        self.announced = False
        """Its prefix is in the ring."""
        self.done = 0
        """Bytes of the tensor that are in the ring."""
        self.transfer = Transfer(header.nbytes)

    @classmethod
    def of(cls, tensor: Tensor | None) -> Message:
        """Of any CPU tensor; a non-contiguous one is copied.

        Raises:
            UnsupportedError: a device, layout or dtype that is not carried.
        """
        if tensor is None:
            return cls(NONE_HEADER, Span.flat(0), None)
        if is_plain(tensor):  # as memory_of finds it, without making the view
            owner: Any = tensor, tensor.untyped_storage()  # by its .data it may be given another one
            address = tensor.data_ptr()
        else:
            owner = memory = memory_of(tensor)
            address = address_of(memory)
        return cls(header_of(tensor.dtype, tensor.shape), Span.flat(address), owner)

    @property
    def complete(self) -> bool:
        """Whether all of it is in the ring."""
        return self.announced and self.done == self.header.nbytes

    @property
    def least_room(self) -> int:
        """Bytes of the ring that must be free before another step can make progress."""
        return LINE if self.announced else len(self.header.prefix)

    def drop(self) -> None:
        """Release the caller's memory."""
        self._owner = None


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a plain dense CPU tensor, whose bytes lie in memory as they are sent."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and is_dense(tensor)
    )
