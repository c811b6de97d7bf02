"""Forked children close what they inherited, and never share a stream with their parent.

A forked child has the parent's descriptors but none of its threads. Two processes that read one stream would
each get half of it, so every kvplug object that owns descriptors registers here. A lock that another thread
of the parent held at the fork would stay held in the child, so the locks in the attributes of all registered
objects are freed before anything is closed.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Final, Protocol, TypeVar

from kvplug.net.exclusive_use import ExclusiveUse

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOCKS: Final = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event),
    ExclusiveUse,
)
"""These types have the method with which Python frees its own locks in a forked child."""


class Inherited(Protocol):
    """An object that owns descriptors."""

    def _after_fork_in_child(self) -> None:
        """Close the descriptors and mark the object closed; later calls raise ``ClosedError``.

        Locks, conditions and events in its attributes have been freed by then. This must not shut down
        sockets, which the parent still uses, nor change an epoll set, which the parent shares. Only closing
        descriptors is safe.
        """


_registered: Final[weakref.WeakValueDictionary[int, Inherited]] = weakref.WeakValueDictionary()
"""By identity."""
_modules: Final[list[ModuleType]] = []


def close_after_fork(thing: Inherited) -> None:
    """Free the locks in the attributes of ``thing`` and call ``thing._after_fork_in_child()`` in every forked
    child, as long as ``thing`` lives."""
    _registered[id(thing)] = thing


def alive(things: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """Return the living values. Other threads and signal handlers may add values at the same time."""
    return [thing for ref in things.valuerefs() if (thing := ref()) is not None]


def free_locks_after_fork(module: ModuleType) -> None:
    """Free the locks among a module's globals in every forked child."""
    _modules.append(module)


def _free_locks(owner: object) -> None:
    for each in getattr(owner, "__dict__", {}).values():
        if isinstance(each, _LOCKS):
            each._at_fork_reinit()  # type: ignore[union-attr]


def _close(thing: Inherited) -> None:
    thing._after_fork_in_child()


def _in_child() -> None:
    inherited = alive(_registered)
    _registered.clear()
    _call(_free_locks, (*_modules, *inherited))
    _call(_close, inherited)


def _call(step: Callable[[T], None], things: Iterable[T]) -> None:
    """Call ``step`` for each of ``things``; log a failure and continue."""
    for thing in things:
        try:
            step(thing)
        except Exception:
            logger.exception("closing %r in a forked child failed", type(thing).__name__)


os.register_at_fork(after_in_child=_in_child)
