"""The words of a ring in shared memory, and sleeping on them."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from kvplug.transport import Segment
from kvplug_shm.memory import futex
from kvplug_shm.memory.words import Words
from kvplug_testing import peers

SIZE = 4096


@pytest.fixture
def segment() -> Segment:
    made, fd = Segment.create("test", SIZE)
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
    made, fd = Segment.create("test", SIZE)
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
    words = Words(segment, 64, 2)
    words.words[1] = value
    sleeper = threading.Thread(target=words.wait, args=(1, value, 60), daemon=True)
    sleeper.start()
    while sleeper.is_alive():
        assert not futex.wake(segment.address + 64)
        words.wake(1)
        time.sleep(0.001)


# -- in two processes ------------------------------------------------------------------------------------


def sleep_on(parent: peers.Parent, fd: int, index: int, seen: int) -> str:
    words = Words(Segment.attach(fd, SIZE), 0, 4)
    words.words[3] += 1
    while words.words[index] == seen:
        words.wait(index, seen, 60)
    return f"{words.words[index]}"


def wait_for(words: Words, index: int, value: int) -> None:
    while words.words[index] != value:
        time.sleep(0.001)


def test_another_process_is_woken_by_the_word_it_sleeps_on() -> None:
    segment, fd = Segment.create("test", SIZE)
    words = Words(segment, 0, 4)
    with peers.start(sleep_on, fd, 1, 0, pass_fds=[fd]) as child:
        os.close(fd)
        wait_for(words, 3, 1)
        while not futex.wake(segment.address + 64):  # it sleeps; nothing has changed, so it does so again
            time.sleep(0.001)
        assert not futex.wake(segment.address + 128)
        words.words[1] = 42
        words.fence()
        words.wake(1)
        assert child.result() == "42"


def sleep_through_signals(parent: peers.Parent) -> Any:
    segment, fd = Segment.create("test", SIZE)
    os.close(fd)
    words = Words(segment, 0, 1)
    ran: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: ran.append(number))
    parent.send("ready")
    while not ran:
        words.wait(0, 0, 60)
    return len(ran)


def test_a_signal_ends_the_sleep_and_its_handler_runs() -> None:
    with peers.start(sleep_through_signals) as child:
        child.recv()
        while child.exit_code is None:  # one that comes just before the call would not end it
            os.kill(child.pid, signal.SIGUSR2)
            time.sleep(0.01)
        assert child.result() >= 1


@pytest.mark.parametrize("seconds", [0, -1, 0.0, 1e-9, 0.001])
def test_a_sleep_ends_by_itself(segment: Segment, seconds: float) -> None:
    Words(segment, 0, 1).wait(0, 0, seconds)


def test_a_limit_may_be_very_long(segment: Segment) -> None:
    for seconds in (1e12, float("inf")):
        Words(segment, 0, 1).wait(0, 1, seconds)


def test_where_no_word_can_be_nobody_sleeps(segment: Segment) -> None:
    for address in (segment.address + 1, 0):
        with pytest.raises(OSError, match=r"argument|address"):
            futex.wait(address, 0, 60)
    assert futex.is_there()


def test_all_who_sleep_are_woken(segment: Segment) -> None:
    sleepers = [
        threading.Thread(target=futex.wait, args=(segment.address, 0, 60), daemon=True) for _ in range(3)
    ]
    for sleeper in sleepers:
        sleeper.start()
    woken = 0
    while woken < 3:
        woken += futex.wake(segment.address)
        time.sleep(0.001)
    for sleeper in sleepers:
        sleeper.join(30)
    assert woken == 3
