"""A pool of memory for received tensors.

Fresh pages cost ten times the copy that fills them. So the memory of a large tensor is a mapping that an
earlier tensor used, and returns to the pool when the tensor and every view of it are freed, by any thread in
any state.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from typing import Final

import torch

from kvplug.net.wire.copying import address_of
from kvplug.net.wire.tensors import TensorMeta, dtype_of, empty_like_meta
from kvplug.transport import NamedExhaustion, close_after_fork

POOLED_FROM: Final = 1024 * 1024
"""Bytes of a tensor from which its memory is recycled; below, the C library recycles it itself."""
_HUGE_PAGE: Final = 2 * 1024 * 1024
_MOST: Final = sys.maxsize - 2 * _HUGE_PAGE
_WASTE: Final = 2
"""How many times too large a block may be."""


class _Block:
    """Private memory of this process, unmapped with the last reference."""

    __slots__ = ("_memory", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        """Raises OSError: there is not that much."""
        if nbytes > _MOST:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        large = nbytes >= _HUGE_PAGE
        self._memory = mmap.mmap(
            -1,
            self.nbytes + (_HUGE_PAGE if large else 0),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,  # a forked child's writes are its own
        )
        begin = self.address = address_of(memoryview(self._memory))
        if large:
            self.address = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
            try:
                self._memory.madvise(
                    mmap.MADV_HUGEPAGE, self.address - begin, self.nbytes // _HUGE_PAGE * _HUGE_PAGE
                )
            except OSError:
                pass  # a hint: refusal does not matter


class _Lent(ctypes.c_ubyte * (sys.maxsize // 2)):  # type: ignore[misc]
    """The buffer object that a tensor keeps alive. One type for every size; a tensor uses a part of it."""

    pool: weakref.ref[Pool]
    block: _Block | None = None

    def __del__(self) -> None:
        if self.block is not None and (pool := self.pool()) is not None:
            pool._give_back(self.block)


class Pool:
    """The pool. It keeps at most ``max_bytes`` of unused memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._closed = False
        self._idle: list[_Block] = []
        """Unused blocks, in the order in which they were returned."""
        self._back: deque[_Block] = deque()
        """Blocks that were returned while the lock was held."""
        self._lent: dict[int, int] = {}
        # A finalizer may run while its own thread holds this: it never waits for it.
        self._lock = threading.Lock()
        close_after_fork(self)

    @property
    def idle_bytes(self) -> int:
        """Bytes of unused memory in the pool."""
        self._settle()
        return sum(block.nbytes for block in list(self._idle))

    @property
    def lent_bytes(self) -> int:
        """Bytes of memory that live tensors use."""
        return sum(list(self._lent.values()))

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        """A contiguous CPU tensor with unset elements.

        Raises:
            UnsupportedError: the torch installed here lacks the dtype.
            ResourceExhaustedError: there is not that much memory.
        """
        nbytes = meta.nbytes
        if nbytes < POOLED_FROM:
            return empty_like_meta(meta)
        dtype = dtype_of(meta.dtype)
        block = self._best_fit(nbytes) or self._fresh(nbytes)
        lent = _Lent.from_address(block.address)
        lent.pool = weakref.ref(self)
        lent.block = block
        self._lent[id(block)] = block.nbytes
        # Given its shape in place, which is cheaper than a view, and the tensor is no view.
        return torch.frombuffer(lent, dtype=dtype, count=nbytes // meta.itemsize).resize_(meta.shape)

    def close(self) -> None:
        """Free unused memory, and keep none from now on. Memory in use is freed with its tensor."""
        self._closed = True
        self._drop_idle()

    def _best_fit(self, nbytes: int) -> _Block | None:
        """The smallest block that is large enough, and among equals the last used one, which may be in a
        cache.
        """
        best: _Block | None = None
        with self._lock:
            dropped = self._put_away()
            for block in reversed(self._idle):
                if nbytes <= block.nbytes <= nbytes * _WASTE and (best is None or block.nbytes < best.nbytes):
                    best = block
            if best is not None:
                self._idle.remove(best)
        dropped.clear()  # unmapping takes time
        self._settle()
        return best

    def _fresh(self, nbytes: int) -> _Block:
        try:
            return _Block(nbytes)
        except OSError:
            self._drop_idle()
        with NamedExhaustion(f"a tensor of {nbytes} bytes"):
            return _Block(nbytes)

    def _drop_idle(self) -> None:
        with self._lock:
            dropped = self._put_away() + self._idle
            self._idle = []
        dropped.clear()
        self._settle()

    def _give_back(self, block: _Block) -> None:
        """In a finalizer, of any thread."""
        self._lent.pop(id(block), None)
        self._back.append(block)
        self._settle()

    def _settle(self) -> None:
        """Process returned blocks; if another thread holds the lock, that thread does it afterwards."""
        while self._back and self._lock.acquire(blocking=False):
            try:
                dropped = self._put_away()
            finally:
                self._lock.release()
            dropped.clear()

    def _put_away(self) -> list[_Block]:
        """With the lock: keep returned blocks; beyond the limit, free those unused for longest."""
        limit = 0 if self._closed else self._max_bytes
        dropped: list[_Block] = []
        while self._back:
            block = self._back.popleft()
            (self._idle if block.nbytes <= limit else dropped).append(block)
        idle = sum(block.nbytes for block in self._idle)
        while idle > limit:
            idle -= self._idle[0].nbytes
            dropped.append(self._idle.pop(0))
        return dropped

    def _after_fork_in_child(self) -> None:
        """All memory is the child's own, as it was in the parent."""
