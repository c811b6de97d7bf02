"""Waiting for the other end of a ring: look often for a moment, then sleep.

A look costs a microsecond of a processor and sees what comes at once; a sleep costs nothing, and some 30
microseconds to wake from.
"""

from __future__ import annotations

from typing import Final, Protocol

SPIN_S: Final = 50e-6
"""How long is looked before it is slept."""
NAP_S: Final = 0.2
"""The longest that is slept in one piece: a wake that was lost, or a signal that came just before, costs no
more than this."""


class Sleeper(Protocol):
    """An end of a ring."""

    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        """Sleep until the word changes that is awaited."""


def wait(end: Sleeper, awaited: tuple[int, int], pause: float | None) -> None:
    """One sleep, of ``pause`` seconds at most; ``None``: as long as one sleep may be."""
    end.park(awaited, NAP_S if pause is None else min(pause, NAP_S))
