"""Polling a device without burning a core: at first without a pause, then with longer and longer ones."""

from __future__ import annotations

import time
from typing import Final

_SPIN_S: Final = 100e-6
"""Seconds of polling without a pause; most small messages are copied within them."""
_SHORTEST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3


class Backoff:
    """The pauses of one wait. Call :meth:`reset` when there was progress."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Poll without a pause again."""
        self._began = time.monotonic()
        self._pause_s = _SHORTEST_PAUSE_S

    def pause(self) -> None:
        """Sleep until the next poll is due."""
        if time.monotonic() - self._began < _SPIN_S:
            time.sleep(0)  # lets other threads have the interpreter
            return
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
