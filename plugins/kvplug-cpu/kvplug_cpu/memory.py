"""Memory that messages are received into."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

from kvplug.net.wire.tensors import TensorMeta, empty_like_meta

_HUGE_PAGE = 2 * 1024 * 1024
_ALWAYS_FRESH_BYTES = 32 * 1024 * 1024
"""glibc maps and unmaps blocks above this each time; smaller ones it recycles, and there asking for huge
pages was measured to cost more than it saves (64 MiB: 4.7 against 2.7 GB/s; 16 MiB: twice the CPU time)."""


def fresh(meta: TensorMeta) -> torch.Tensor:
    """A new tensor; a large one asks for huge pages, since touching new 4 KiB pages costs more than a copy.

    Raises:
        ResourceExhaustedError: there is not that much memory.
    """
    tensor = empty_like_meta(meta)
    if meta.nbytes >= _ALWAYS_FRESH_BYTES:
        _advise_huge_pages(tensor.data_ptr(), meta.nbytes)
    return tensor


def _advise_huge_pages(address: int, nbytes: int) -> None:
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
    start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    stop = (address + nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if advice is not None and stop > start:
        with contextlib.suppress(OSError, AttributeError):  # a hint: refusal does not matter
            _madvise()(start, stop - start, advice)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    """Raises OSError, AttributeError: the C library has none."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
