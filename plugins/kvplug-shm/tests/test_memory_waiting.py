"""Spinning, then sleeping: a short latency when data arrives, little CPU time when none does."""

from __future__ import annotations

import threading

import pytest

from kvplug_shm.memory import waiting
from kvplug_shm.memory.waiting import NAP_S, SPIN_S
from kvplug_shm.ring.ends import RingEnd


class Counting(RingEnd):
    """An end that counts how often it looks for units, and notes for how long it would sleep."""

    def __init__(self) -> None:
        self.units = self.looks = 0
        self.parks: list[float | None] = []

    def blocked_on(self, count: int = 1) -> tuple[int, int] | None:
        self.looks += 1
        return None if self.units >= count else (0, self.units)

    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        self.parks.append(seconds)


def test_what_is_there_is_looked_at_once_and_what_does_not_come_is_given_up() -> None:
    end = Counting()
    assert not end.spin(1, SPIN_S)
    assert end.looks > 1
    for units, seconds, found in ((0, 0.0, False), (3, SPIN_S, True)):
        end.units, end.looks = units, 0
        assert end.spin(3, seconds) is found
        assert end.looks == 1


def test_what_comes_meanwhile_is_seen() -> None:
    end = Counting()
    other = threading.Timer(0.05, setattr, (end, "units", 2))
    other.start()
    assert end.spin(2, 60.0)
    other.join()


@pytest.mark.parametrize(("pause", "longest"), [(None, NAP_S), (1000.0, NAP_S), (0.0, 0.0), (SPIN_S, SPIN_S)])
def test_one_nap_is_never_long(pause: float | None, longest: float) -> None:
    end = Counting()
    waiting.wait(end, (0, 0), pause)
    assert end.parks == [longest]
