"""A process's memory and other resources, and how they grow over the rounds of a test."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable
from typing import Self

import attrs

from kvplug_testing.resources import Resources, kernel_bytes

MOST_KEPT_BYTES = 32 << 20
"""Bytes that allocators may keep, after any number of rounds."""
MOST_KEPT_OBJECTS = 100
"""Python objects that caches may keep, after any number of rounds."""
_M_MMAP_THRESHOLD = -3
"""The constant ``M_MMAP_THRESHOLD`` of glibc's ``malloc.h``."""


@attrs.frozen
class Footprint:
    """The resources of one process at one moment."""

    resources: Resources
    resident_bytes: int
    objects: int
    """Objects that Python's garbage collector tracks. A leaked pipe leaves dozens of them. 0 under a tracer,
    such as coverage's, which keeps objects for every past thread.
    """

    @classmethod
    def taken(cls) -> Self:
        """Return the footprint of this process, after a garbage collection.

        First returns freed memory to the operating system, if that is possible: leaks would fill that memory,
        and would not show.
        """
        gc.collect()
        _trim()(0)
        num_objects = len(gc.get_objects()) if threading.gettrace() is None else 0
        return cls(Resources.of(), kernel_bytes("self/status", "VmRSS"), num_objects)

    def growth(self, before: Footprint, rounds: int, nbytes: int) -> str:
        """Return a description of what has grown since ``before``; empty if nothing has.

        In each of the ``rounds``, messages of ``nbytes`` are sent and freed. A process that leaks all of them
        grows by their sum; more than half of that counts as growth, because allocators keep some. One Python
        object per four rounds is allowed. Allocators and caches do not grow for ever: :data:`MOST_KEPT_BYTES`
        and :data:`MOST_KEPT_OBJECTS` are the limits for many rounds.
        """
        words = [self.resources.beyond(before.resources)]
        grown = self.resident_bytes - before.resident_bytes
        if grown > min(rounds * nbytes // 2, MOST_KEPT_BYTES):
            words.append(f"{grown:,} bytes of memory more after {rounds} rounds with {nbytes:,} bytes each")
        more = self.objects - before.objects
        if more > min(max(20, rounds // 4), MOST_KEPT_OBJECTS):
            words.append(f"{more} Python objects more after {rounds} rounds")
        return "; ".join(word for word in words if word)


@functools.cache
def _trim() -> Callable[[int], object]:
    """Return glibc's ``malloc_trim``, or a function that does nothing.

    The first call also makes glibc map each large block on its own. Otherwise glibc keeps megabytes of freed
    blocks at the end of each arena (it has eight for each processor), which ``malloc_trim`` does not return.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return lambda _: None
    libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    return libc.malloc_trim
