"""Ctrl-C during measurements: noticed at once, raised only at safe points.

Python may raise KeyboardInterrupt between any two steps of the main thread. If the main thread has just taken
a future's lock, the future's thread waits for that lock forever. If it has just started a process, nothing
ends that process. Inside a finalizer the exception is printed and lost.
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


class DeferredInterrupts:
    """The SIGINT handler in a block of :func:`deferred_interrupts`; the block asks it for interrupts."""

    def __init__(self) -> None:
        self._came = False
        self._awaited: SimpleQueue[Any] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt: this is the second SIGINT."""
        if self._came:
            signal.default_int_handler(number, frame)
        self._came = True
        if self._awaited is not None:
            self._awaited.put(None)  # safe in a handler, even while this thread waits in get()

    def check(self) -> None:
        """Raises KeyboardInterrupt: a SIGINT has arrived."""
        if self._came:
            raise KeyboardInterrupt

    def get(self, queue: SimpleQueue[T]) -> T:
        """The next item of ``queue``, which has no other reader. Raises KeyboardInterrupt: a SIGINT has
        arrived.
        """
        self._awaited = queue
        self.check()
        got = queue.get()
        self.check()
        return got


@contextmanager
def deferred_interrupts() -> Iterator[DeferredInterrupts]:
    """In the block, SIGINT raises only at ``check``, ``get`` and the end; a second SIGINT raises at once.

    A nested block shares the outer block's handler. The block does nothing outside the main thread, or if
    SIGINT does not have Python's default handler.

    Raises:
        KeyboardInterrupt: a SIGINT has arrived.
    """
    before = signal.getsignal(signal.SIGINT)
    interrupts = before if isinstance(before, DeferredInterrupts) else DeferredInterrupts()
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
