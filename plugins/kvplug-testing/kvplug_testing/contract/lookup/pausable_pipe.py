"""A data pipe that can be paused in the middle of an entry, at the receiving end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvplug import TimeoutError
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, Pipe, Timeout
from kvplug_testing.pairs import PipeAround

if TYPE_CHECKING:
    from torch import Tensor


class PausablePipe(PipeAround):
    """A pipe that can be paused. A receive that times out loses nothing."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        self._left: int | None = None
        self._paused = threading.Event()

    def pause_after(self, after: int) -> None:
        """Pass ``after`` more messages, and pause before the next one."""
        self._left = after

    def resume(self) -> None:
        self._left = None

    def wait_until_paused(self, within: float) -> bool:
        """Wait until a receive is paused; returns whether one is in time."""
        return self._paused.wait(within)

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        deadline = Deadline.after(timeout, 60.0)
        while self._left == 0 and not self.closed:
            self._paused.set()
            if deadline.expired:
                raise TimeoutError("nothing came in time")
            time.sleep(0.002)
        received = super().recv_tensor(out, timeout=deadline.remaining())
        if self._left:
            self._left -= 1
        return received
