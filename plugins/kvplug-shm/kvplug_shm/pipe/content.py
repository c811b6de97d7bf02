"""A message on its way into the ring: a prefix, then the tensor's bytes, both padded to a cache line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvplug.net.wire.copying import address_of
from kvplug.net.wire.tensors import is_dense, memory_of
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.header import NONE_HEADER, header_of

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Content:
    """A message's prefix, which announces it, and the tensor's memory, which it keeps alive."""

    __slots__ = ("_owner", "_span", "address", "header")

    def __init__(self, tensor: Tensor | None) -> None:
        """From any CPU tensor; a non-contiguous one is copied.

        Raises:
            UnsupportedError: a device, layout or dtype that is not carried.
        """
        self._owner: Any = tensor
        self._span: Span | None = None
        self.address = 0
        if tensor is None:
            self.header = NONE_HEADER
            return
        if is_plain(tensor):  # as memory_of finds it, without making the view
            self._owner = tensor, tensor.untyped_storage()  # by its .data it may be given another one
            self.address = tensor.data_ptr()
        else:
            self._owner = memory = memory_of(tensor)
            self.address = address_of(memory)
        self.header = header_of(tensor.dtype, tensor.shape)

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.header.nbytes

    @property
    def span(self) -> Span:
        """The memory for the compiled steps."""
        if self._span is None:
            self._span = Span.flat(self.address)
        return self._span

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
