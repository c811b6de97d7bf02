"""The words of a ring in shared memory, and sleeping on them."""

from __future__ import annotations

import os

import pytest

from kvplug.transport import Segment
from kvplug_shm.memory.words import Words
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.waits import Call, until

SIZE = 4096


@pytest.fixture
def segment() -> Segment:
    made, fd = Segment.create("test", SIZE)
    os.close(fd)
    return made


def test_words_lie_on_lines_of_their_own_and_outlive_their_segment() -> None:
    segment, fd = Segment.create("test", SIZE)
    words, memory = Words(segment, 128, 3), Segment.attach(fd, SIZE).view
    os.close(fd)
    del segment
    values = [0x1122334455667700 + index for index in range(3)]
    assert Words.size(3) == 192
    for index, value in enumerate(values):
        words.store(index, value)
    assert [words.load(index) for index in range(3)] == values
    assert [int.from_bytes(memory[at : at + 8], "little") for at in (128, 192, 256)] == values
    assert not any(memory[:128]) and not any(memory[320:])


@pytest.mark.parametrize(("offset", "count"), [(8, 1), (-64, 1), (4096, 1), (64, 64), (0, 0)])
def test_words_that_do_not_fit_are_refused(segment: Segment, offset: int, count: int) -> None:
    with pytest.raises(ValueError, match="words at"):
        Words(segment, offset, count)


def test_a_changed_word_is_not_slept_on_and_a_sleep_has_an_end(segment: Segment) -> None:
    words = Words(segment, 0, 2)
    words.store(1, 7)
    for seconds in (None, 1e12, float("inf")):
        words.wait(1, 6, seconds)
    for seconds in (0, -1, 0.0, 1e-9, 0.001):
        words.wait(1, 7, seconds)


def test_another_process_is_woken_by_the_word_it_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "NAP_S", 1000.0)
    segment, fd = Segment.create("test", SIZE)
    ours = os.dup(fd)  # the child closes the other one
    words = Words(segment, 0, 4)
    before = (1 << 40) + 2
    words.store(1, before)

    def sleep() -> str:
        theirs = Words(Segment.attach(ours, SIZE), 0, 4)
        while theirs.load(1) == before:
            theirs.store(3, theirs.load(3) + 1)
            theirs.wait(1, before, 60)
        return str(theirs.load(1))

    sleeps = Call(lambda: in_forked_child(sleep))
    until(lambda: words.load(3))
    until(lambda: words.wake(1) or words.load(3) > 1)  # it sleeps; nothing has changed, so it does so again
    words.store(1, 42)
    assert sleeps.result() == "42"
    os.close(fd)
    os.close(ours)
