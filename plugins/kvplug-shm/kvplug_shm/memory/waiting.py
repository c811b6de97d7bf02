"""Waiting for the other end: look often for a moment, then sleep.

A look costs a microsecond of a processor and sees what comes at once; a sleep costs nothing, and some 30
microseconds to wake from.
"""

from __future__ import annotations

import os
import time
from typing import Final, Protocol

SPIN_S: Final = 50e-6
"""How long is looked before it is slept."""
NAP_S: Final = 0.1
"""The longest that is slept in one piece: a wake that was lost, or a signal that came just before, costs no
more than this."""


class End(Protocol):
    """Of a ring."""

    def awaited(self, count: int = 1) -> tuple[int, int] | None:
        """The word that has to change, and what was seen there."""

    def doze(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        """Sleep until it changes."""


def nap(end: End, awaited: tuple[int, int], pause: float | None) -> None:
    """One sleep, of ``pause`` seconds at most; ``None``: as long as one sleep may be."""
    end.doze(awaited, NAP_S if pause is None else min(pause, NAP_S))


def spun(end: End, count: int = 1, spin_s: float = SPIN_S) -> bool:
    """Whether ``count`` units need not be waited for, after looking for ``spin_s`` seconds."""
    awaited = end.awaited
    if awaited(count) is None:
        return True
    until = time.monotonic() + spin_s
    while time.monotonic() < until:
        os.sched_yield()
        if awaited(count) is None:
            return True
    return False
