"""The words of a ring in shared memory, and sleeping on them."""

from __future__ import annotations

import os
import threading
import time

import pytest

from kvplug_shm.memory import futex
from kvplug_shm.memory.segment import Segment
from kvplug_shm.memory.words import Words


@pytest.fixture
def segment() -> Segment:
    made, fd = Segment.create("test", 4096)
    os.close(fd)
    return made


def test_words_lie_on_lines_of_their_own(segment: Segment) -> None:
    words = Words(segment, 128, 3)
    assert Words.size(3) == 192
    for index in range(3):
        words.words[index] = 0x1122334455667700 + index
    for index in range(3):
        at = 128 + 64 * index
        assert segment.view[at : at + 8] == (0x1122334455667700 + index).to_bytes(8, "little")
    words.fence()
    assert list(words.words) == [0x1122334455667700 + index for index in range(3)]
    assert not any(segment.view[:128]) and not any(segment.view[320:])


@pytest.mark.parametrize(("offset", "count"), [(8, 1), (-64, 1), (4096, 1), (64, 64), (0, 0)])
def test_words_that_do_not_fit_are_refused(segment: Segment, offset: int, count: int) -> None:
    with pytest.raises(ValueError, match="words at"):
        Words(segment, offset, count)


def test_the_words_outlive_their_segment(segment: Segment) -> None:
    made, fd = Segment.create("test", 4096)
    os.close(fd)
    words = Words(made, 0, 1)
    del made
    words.words[0] = 5
    words.wake(0)
    assert words.words[0] == 5


def test_a_changed_word_is_not_slept_on(segment: Segment) -> None:
    words = Words(segment, 0, 2)
    words.words[1] = 7
    words.wait(1, 6, None)  # would be for ever


@pytest.mark.parametrize("value", [0, (1 << 40) + 2])
def test_who_sleeps_on_the_low_half_is_woken(segment: Segment, value: int) -> None:
    words = Words(segment, 64, 1)
    words.words[0] = value
    sleeper = threading.Thread(target=words.wait, args=(0, value, 60), daemon=True)
    sleeper.start()
    while not futex.wake(segment.address + 64):
        time.sleep(0.001)
    sleeper.join(30)
    assert not sleeper.is_alive()
