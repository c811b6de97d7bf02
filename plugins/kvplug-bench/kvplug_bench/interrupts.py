"""Ctrl-C while processes are measured: heard at once, raised where nothing is half done.

A KeyboardInterrupt can come between any two steps of the main thread. Where that has just taken the lock of a
future, the thread of that future waits for it without end. Where it has just started one more process, nobody
ends that. In the middle of a finalizer it is printed and forgotten.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupts:
    """The handler of SIGINT in a block of :func:`held_back`, and what the block asks."""

    def __init__(self) -> None:
        self._came = False
        self._awaited: SimpleQueue[Any] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt: it is not the first."""
        if self._came:
            signal.default_int_handler(number, frame)
        self._came = True
        if self._awaited is not None:
            self._awaited.put(None)  # the one call that a handler may make while its own thread waits there

    def check(self) -> None:
        """Raises KeyboardInterrupt: one came."""
        if self._came:
            raise KeyboardInterrupt

    def get(self, queue: SimpleQueue[T]) -> T:
        """The next of ``queue``, which nobody else reads. Raises KeyboardInterrupt: one came."""
        self._awaited = queue
        self.check()
        got = queue.get()
        self.check()
        return got


@contextmanager
def held_back() -> Iterator[Interrupts]:
    """In the block SIGINT raises only where that is asked for, and at the end; a second one does at once.

    In a block within the block that of the outer one goes on. Where SIGINT is handled otherwise, and in other
    threads than the main one, nothing is changed.

    Raises:
        KeyboardInterrupt: one came.
    """
    before = signal.getsignal(signal.SIGINT)
    interrupts = before if isinstance(before, Interrupts) else Interrupts()
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and before is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, interrupts)
    try:
        interrupts.check()
        yield interrupts
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)
        interrupts.check()
