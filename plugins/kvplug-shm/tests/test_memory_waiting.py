"""Spinning, then sleeping: a short latency when data arrives, little CPU time when none does."""

from __future__ import annotations

import os
import resource
import threading
import time

import pytest

from kvplug.transport import Segment
from kvplug_shm.memory import waiting
from kvplug_shm.memory.waiting import NAP_S, SPIN_S
from kvplug_shm.memory.words import Words
from kvplug_shm.ring.ends import RingEnd


class Counting(RingEnd):
    """An end with a word that counts units, and a word that is set while a process sleeps."""

    def __init__(self) -> None:
        segment, fd = Segment.create("test", 4096)
        os.close(fd)
        self.memory = Words(segment, 0, 2)
        self.looks = 0
        self.parks: list[float | None] = []

    def blocked_on(self, count: int = 1) -> tuple[int, int] | None:
        self.looks += 1
        seen = self.memory.words[0]
        return None if seen >= count else (0, seen)

    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        self.parks.append(seconds)
        self.memory.words[1] = 1
        self.memory.wait(*awaited, seconds)


def test_what_is_there_is_looked_at_once() -> None:
    end = Counting()
    end.memory.words[0] = 3
    assert end.spin(3, SPIN_S)
    assert end.looks == 1


def test_what_does_not_come_is_given_up() -> None:
    end = Counting()
    assert not end.spin(1, SPIN_S)
    assert end.looks > 1
    end.looks = 0
    assert not end.spin(1, 0.0)
    assert end.looks == 1


def test_what_comes_meanwhile_is_seen() -> None:
    end = Counting()
    other = threading.Timer(0.05, end.memory.words.__setitem__, (0, 2))
    other.start()
    assert end.spin(2, 60.0)
    other.join()


@pytest.mark.parametrize(("pause", "longest"), [(None, NAP_S), (1000.0, NAP_S), (0.0, 0.0), (SPIN_S, SPIN_S)])
def test_one_nap_is_never_long(pause: float | None, longest: float) -> None:
    end = Counting()
    awaited = end.blocked_on()
    assert awaited is not None
    waiting.wait(end, awaited, pause)
    assert end.parks == [longest]


@pytest.mark.timing
def test_a_sleeper_uses_no_processor_to_speak_of() -> None:
    end = Counting()

    def until_something_comes() -> None:
        while (awaited := end.blocked_on()) is not None:
            if not end.spin(1, SPIN_S):
                waiting.wait(end, awaited, None)

    sleeper = threading.Thread(target=until_something_comes)
    sleeper.start()
    while not end.parks:
        time.sleep(0.001)
    used, naps, began = resource.getrusage(resource.RUSAGE_SELF), len(end.parks), time.monotonic()
    while len(end.parks) < naps + 15:
        time.sleep(0.1)
    now = resource.getrusage(resource.RUSAGE_SELF)
    share = (now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime) / (time.monotonic() - began)
    end.memory.words[0] = 1
    end.memory.wake(0)
    sleeper.join(30)
    assert not sleeper.is_alive()
    assert share < 0.05
