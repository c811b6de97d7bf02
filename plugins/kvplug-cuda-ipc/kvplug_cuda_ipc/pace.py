"""How one looks again and again at what a device does: at once, then a little later each time."""

from __future__ import annotations

import time
from typing import Final

_LOOK_S: Final = 100e-6
"""For so long without a pause; most small messages are over by then."""
_SHORTEST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3


class Pace:
    """For one wait. :meth:`stir` when something has happened."""

    def __init__(self) -> None:
        self.stir()

    def stir(self) -> None:
        self._began = time.monotonic()
        self._pause = _SHORTEST_PAUSE_S

    def rest(self) -> None:
        """Until it is time to look again."""
        if time.monotonic() - self._began < _LOOK_S:
            time.sleep(0)  # others want the interpreter, too
            return
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
