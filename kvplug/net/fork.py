"""Forked children close what they inherited, and never share a stream with their parent.

A forked child has the parent's descriptors but none of its threads. Two processes that read one stream would
each get half of it, so everything of kvplug that owns descriptors registers here. A lock that another thread
of the parent held at the fork would stay held in the child: before anything is closed, the locks in the
attributes of everything that is registered are made free.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Final, Generic, Protocol, TypeVar

from kvplug.net.exclusive_use import ExclusiveUse

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
"""What Python itself makes free in a forked child, by a method that they have for that."""


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


class Inherited(Protocol):
    """An object that owns descriptors."""

    def _after_fork_in_child(self) -> None:
        """Close the descriptors and mark the object closed; later calls raise ``ClosedError``.

        Locks, conditions and events in its attributes are free by then. It must not shut sockets down (the
        parent still uses them) and must not change an epoll set, which is shared with the parent too:
        closing descriptors is all that is safe.
        """


_registered: Final = LiveObjects[Inherited]()
_modules: Final[list[ModuleType]] = []


def close_after_fork(thing: Inherited) -> None:
    """Free the locks in the attributes of ``thing`` and call ``thing._after_fork_in_child()`` in every forked
    child, as long as ``thing`` lives."""
    _registered.add(thing)


def free_locks_after_fork(module: ModuleType) -> None:
    """Free the locks that are globals of a module in every forked child."""
    _modules.append(module)


def _free_locks(owner: object) -> None:
    for each in getattr(owner, "__dict__", {}).values():
        if isinstance(each, ExclusiveUse):
            each._renew()
        elif isinstance(each, _LOCKS):
            each._at_fork_reinit()  # type: ignore[union-attr]


def _close(thing: Inherited) -> None:
    thing._after_fork_in_child()


def _in_child() -> None:
    inherited = _registered.all()
    _registered.clear()
    _call(_free_locks, (*_modules, *inherited))
    _call(_close, inherited)


def _call(step: Callable[[T], None], things: Iterable[T]) -> None:
    """What fails is logged, and the rest is done."""
    for thing in things:
        try:
            step(thing)
        except Exception:
            logger.exception("closing %r in a forked child failed", type(thing).__name__)


os.register_at_fork(after_in_child=_in_child)
