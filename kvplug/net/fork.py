"""Forked children close what they inherited, and never share a stream with their parent.

A forked child has the parent's descriptors but none of its threads. Two processes that read one stream would
each get part of it, so every kvplug object that owns descriptors registers here. A lock that another thread
of the parent held at the fork would stay held in the child, so the locks in the attributes of all registered
objects are freed before anything is closed.

Python releases its own lock while the kernel makes or closes a descriptor, so a fork in another thread could
come before the descriptor's owner is registered, or after a socket has forgotten the descriptor that it is
closing. :data:`no_fork` prevents this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
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
"""Types with ``_at_fork_reinit``, by which Python frees its own locks in a forked child."""


_FORK_WAIT_S: Final = 1.0
"""The longest time that a fork waits for :data:`no_fork`."""

no_fork: Final = threading.RLock()
"""Held while a descriptor is made and registered, or closed: no other thread forks meanwhile. Code that holds
it must not wait for anything: connect, send and receive after releasing it."""


class Inherited(Protocol):
    """An object that owns descriptors."""

    def _after_fork_in_child(self) -> None:
        """Close the descriptors and mark the object closed; later calls raise ``ClosedError``.

        Locks, conditions and events in its attributes have been freed by then. This must not shut down
        sockets, which the parent still uses, nor change an epoll set, which the parent shares. Only closing
        descriptors is safe.
        """


_registered: Final[weakref.WeakValueDictionary[int, Inherited | socket.socket]] = (
    weakref.WeakValueDictionary()
)
"""By ``id()``."""
_modules: Final[list[ModuleType]] = []
_descriptors: Final[dict[int, tuple[object, ...]]] = {}
"""By descriptor: the result of :func:`_file_of` at its registration."""


def close_after_fork(*things: Inherited | socket.socket) -> None:
    """In every forked child, free the locks in the attributes of each of ``things`` that is still alive, and
    call its ``_after_fork_in_child()``. A socket is closed instead."""
    for thing in things:
        _registered[id(thing)] = thing


def close_sockets(*socks: socket.socket) -> None:
    """Close the sockets; no other thread forks meanwhile."""
    with no_fork:
        for sock in socks:
            sock.close()


def close_fd_after_fork(fd: int) -> None:
    """Close a descriptor of shared memory or of a process in every forked child.

    The owner may close it without notifying this module: a child closes the number only if it still belongs
    to the same file.
    """
    with contextlib.suppress(OSError):
        _descriptors[fd] = _file_of(fd)


def _file_of(fd: int) -> tuple[object, ...]:
    """Return what distinguishes the file of a descriptor from others. Raises OSError."""
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode):
        return found.st_dev, found.st_ino
    # Before Linux 6.9, pidfds share one inode with many other kinds of descriptors.
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as f:
        return (found.st_dev, found.st_ino, *(line for line in f if line.startswith("Pid:")))


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


def _close(thing: Inherited | socket.socket) -> None:
    if isinstance(thing, socket.socket):
        thing.close()
    else:
        thing._after_fork_in_child()


def _before() -> None:
    no_fork.acquire(timeout=_FORK_WAIT_S)


def _in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # _before timed out
        no_fork.release()


def _in_child() -> None:
    no_fork._at_fork_reinit()  # type: ignore[attr-defined]
    inherited = alive(_registered)
    _registered.clear()
    _call(_free_locks, (*_modules, *inherited))
    _call(_close, inherited)
    for fd, file in _descriptors.items():
        with contextlib.suppress(OSError):  # already closed
            if _file_of(fd) == file:
                os.close(fd)
    _descriptors.clear()


def _call(step: Callable[[T], None], things: Iterable[T]) -> None:
    """Call ``step`` for each of ``things``; log a failure and continue."""
    for thing in things:
        try:
            step(thing)
        except Exception:
            logger.exception("closing %r in a forked child failed", type(thing).__name__)


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
