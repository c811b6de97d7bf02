"""Weak references to objects that have to be found when the process forks, or when the program leaves."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """The registered objects that are still alive, by identity.

    There is no lock: every method is a single operation on a dict, which another thread, a fork or a signal
    handler finds either not begun or done.
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[T]] = {}

    def add(self, thing: T) -> None:
        """Register it for as long as it lives."""
        key = id(thing)

        def forget(ref: weakref.ref[T]) -> None:
            if self._refs.get(key) is ref:
                del self._refs[key]

        self._refs[key] = weakref.ref(thing, forget)

    def all(self) -> list[T]:
        """Those that are alive."""
        found = [ref() for ref in list(self._refs.values())]
        return [thing for thing in found if thing is not None]

    def clear(self) -> None:
        """Forget all of them."""
        self._refs.clear()
