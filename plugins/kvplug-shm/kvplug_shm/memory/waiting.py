"""Waiting for the other end of a ring: spin for a moment, then sleep.

Each spin costs a microsecond of CPU time and notices a change at once; sleeping costs no CPU time, but waking
up takes some 30 microseconds.
"""

from __future__ import annotations

from typing import Final, Protocol

SPIN_S: Final = 50e-6
"""How long an end spins before it sleeps."""
NAP_S: Final = 0.2
"""The longest single sleep: it bounds the delay of a lost wake-up, or of a signal just before the sleep."""


class Sleeper(Protocol):
    """An end of a ring."""

    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        """Sleep until the awaited word changes."""


def wait(end: Sleeper, awaited: tuple[int, int], pause: float | None) -> None:
    """One sleep, of ``pause`` seconds at most; ``None``: the longest single sleep."""
    end.park(awaited, NAP_S if pause is None else min(pause, NAP_S))
