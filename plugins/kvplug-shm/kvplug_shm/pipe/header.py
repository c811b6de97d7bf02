"""The header before a tensor's bytes: the same for all messages of one dtype and shape."""

from __future__ import annotations

import ctypes
import functools
from typing import Final

import torch

from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug_shm.native import library
from kvplug_shm.pipe.geometry import LINE, SMALLEST_COST, lines


class Header:
    """A prefix in whole cache lines, and what it announces."""

    __slots__ = ("_described", "nbytes", "pointer", "prefix")

    def __init__(self, prefix: bytes, nbytes: int) -> None:
        self.prefix = prefix.ljust(lines(len(prefix)), b"\0")
        self.nbytes = nbytes
        """Of the tensor."""
        self._described = library.MessageStruct(
            prefix=self.prefix,
            prefix_bytes=len(self.prefix),
            nbytes=nbytes,
            cost=max(SMALLEST_COST, nbytes),
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
