"""Memory that messages are received into."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch

from kvplug import CapacityError
from kvplug.net.wire.tensors import TensorMeta, empty_like_meta

_HUGE_PAGE = 2 * 1024 * 1024
_ALWAYS_FRESH_BYTES = 32 * 1024 * 1024
"""glibc maps and unmaps blocks above this each time; smaller ones it recycles, and there asking for huge
pages was measured to cost more than it saves (64 MiB: 4.7 against 2.7 GB/s; 16 MiB: twice the CPU time)."""


def fresh(meta: TensorMeta) -> torch.Tensor:
    """A new tensor; a large one asks for huge pages, since touching new 4 KiB pages costs more than a copy.

    Raises:
        CapacityError: there is not that much memory.
    """
    try:
        tensor = empty_like_meta(meta)
    except (RuntimeError, MemoryError) as e:
        raise CapacityError(f"no memory for a tensor of {meta.nbytes} bytes; the message stays") from e
    if meta.nbytes >= _ALWAYS_FRESH_BYTES:
        _advise_huge_pages(tensor.data_ptr(), meta.nbytes)
    return tensor


def _advise_huge_pages(address: int, nbytes: int) -> None:
    advise = _madvise()
    if advise is not None:
        start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
        stop = (address + nbytes) // _HUGE_PAGE * _HUGE_PAGE
        if stop > start:
            advise(start, stop - start, mmap.MADV_HUGEPAGE)  # a hint: refusal does not matter


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
