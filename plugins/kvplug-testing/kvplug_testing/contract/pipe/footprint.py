"""How much memory a process has, and how that grows from one round of a test to the next."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

import attrs

from kvplug_testing.peers import Resources

MOST_KEPT_BYTES = 32 << 20
"""What allocators may keep after any number of rounds."""
MOST_KEPT_OBJECTS = 100
"""The same of caches, in Python objects."""


@attrs.frozen
class Footprint:
    """Of one process, at one moment."""

    resources: Resources
    resident_bytes: int
    objects: int
    """Objects that Python's collector knows. A pipe that is kept is dozens of them. 0 under a tracer, such as
    coverage's: that keeps some of its own for every thread there was."""

    @classmethod
    def taken(cls) -> Self:
        """Of this process, after a collection. Linux; elsewhere memory is 0.

        What was freed and the allocator still has is given back first, where it can be: what is kept from
        then on would lie in it, and not show.
        """
        gc.collect()
        _trim()(0)
        is_traced = threading.gettrace() is not None
        return cls(Resources.of(), _resident(), 0 if is_traced else len(gc.get_objects()))

    def plain(self) -> dict[str, Any]:
        """As plain values, without what only this process can see."""
        held = attrs.asdict(self.resources)
        return {
            "resources": {name: sorted(value) for name, value in held.items()},
            "resident_bytes": self.resident_bytes,
            "objects": self.objects,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        held = {name: frozenset(value) for name, value in plain["resources"].items()}
        return cls(Resources(**held), plain["resident_bytes"], plain["objects"])

    def growth(self, before: Footprint, rounds: int, nbytes: int) -> str:
        """What has grown since ``before``, in words; empty if nothing has.

        In each of the ``rounds`` messages of ``nbytes`` came and went. A process that kept every one would
        have grown by their sum, and half of that is what counts as growth: allocators keep some. Of Python
        objects, it may have one more for every fourth round. What they keep does not grow with the rounds
        for ever: of many rounds :data:`MOST_KEPT_BYTES` and :data:`MOST_KEPT_OBJECTS` are the bound.
        """
        words = [self.resources.beyond(before.resources)]
        grown = self.resident_bytes - before.resident_bytes
        if grown > min(rounds * nbytes // 2, MOST_KEPT_BYTES):
            words.append(f"{grown:,} bytes of memory more after {rounds} rounds with {nbytes:,} bytes each")
        more = self.objects - before.objects
        if more > min(max(20, rounds // 4), MOST_KEPT_OBJECTS):
            words.append(f"{more} Python objects more after {rounds} rounds")
        return "; ".join(word for word in words if word)


def _resident() -> int:
    if not sys.platform.startswith("linux"):
        return 0
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _trim() -> Callable[[int], object]:
    """glibc's ``malloc_trim``, or nothing."""
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
