"""How much room there is and how much has come, whatever the counts and whatever is in the words."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug.transport import Segment, WireError
from kvplug_shm.memory.words import Words
from kvplug_shm.ring import protocol
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd
from kvplug_testing.waits import Call, until

STARTS = [0, 1, 2**31 - 3, 2**31, 2**32 - 2, 2**32, 2**33 - 1, 2**62]


def words_of(num_readers: int, start: int = 0) -> Words:
    segment, fd = Segment.create("test", Words.size(protocol.num_words(num_readers)))
    os.close(fd)
    words = Words(segment, 0, protocol.num_words(num_readers))
    for word in (protocol.HEAD, *map(protocol.tail, range(num_readers))):
        words.store(word, protocol.word_of(start))
    return words


def ring(places: int, num_readers: int = 1, start: int = 0) -> tuple[Words, WritingEnd, list[ReadingEnd]]:
    words = words_of(num_readers, start)
    readers = [ReadingEnd(words, reader, places, read=start) for reader in range(num_readers)]
    return words, WritingEnd(words, num_readers, places, sent=start), readers


@given(st.data())
def test_room_and_what_has_come_add_up_to_the_places(data: Any) -> None:
    places, start = data.draw(st.integers(1, 9)), data.draw(st.sampled_from(STARTS))
    words, writer, readers = ring(places, 3, start)
    sent, read, taking_part = start, [start] * 3, {0, 1, 2}
    for _ in range(data.draw(st.integers(0, 30))):
        reader = data.draw(st.integers(0, 2))
        match data.draw(st.sampled_from(["write", "write", "read", "read", "read", "end", "evict"])):
            case "write":
                count = data.draw(st.integers(0, writer.room()))
                writer.publish(count)
                sent += count
            case "read" if reader in taking_part:
                count = data.draw(st.integers(0, readers[reader].available()))
                readers[reader].release(count)
                read[reader] += count
            case "end" if reader in taking_part:
                readers[reader].end()
                taking_part.discard(reader)
            case "evict":
                writer.evict(reader)
                taking_part.discard(reader)
        room = min([places - (sent - read[each]) for each in taking_part], default=places)
        assert (writer.sent, writer.room()) == (sent, room)
        assert [writer.lag(each) for each in range(3)] == [sent - count for count in read]
        assert [not writer.over(each) for each in range(3)] == [each in taking_part for each in range(3)]
        for each in taking_part:
            assert (readers[each].read, readers[each].available()) == (read[each], sent - read[each])
        for count in range(1, places + 1):
            waits = writer.blocked_on(count)
            assert (waits is None) == (count <= room)
            if waits is not None:
                assert waits in [
                    (protocol.tail(each), words.load(protocol.tail(each))) for each in taking_part
                ]
            assert writer.poll(count) == (waits is None)
            for each in taking_part:
                assert readers[each].poll(count) == (count <= sent - read[each])


@given(st.integers(0, 2**64 - 1), st.integers(1, protocol.MAX_PLACES), st.integers(0, 2**63 - 1))
def test_no_word_makes_more_room_or_more_units_than_there_are_places(
    word: int, places: int, count: int
) -> None:
    words = words_of(2, start=count)
    words.store(protocol.tail(1), word)
    try:
        assert 0 <= WritingEnd(words, 2, places, sent=count).room() <= places
    except WireError:
        assert not word & protocol.OVER and not 0 <= count - (word >> 1) <= places
    words.store(protocol.HEAD, word)
    try:
        assert 0 <= ReadingEnd(words, 0, places, read=count).available() <= places
    except WireError:
        assert (word >> 1) - count > places


def test_a_reader_that_was_evicted_may_be_overtaken_and_finds_out() -> None:
    words, writer, [reader] = ring(2)
    writer.publish(2)
    writer.evict(0)
    reader.release()  # it was only stopped: the bit is lost
    assert not protocol.is_over(words.load(protocol.tail(0)))
    assert (writer.over(0), writer.room(), writer.blocked_on(2)) == (True, 2, None)
    writer.publish(2)
    writer.publish(2)
    assert (writer.room(), writer.lag(0)) == (2, 5)
    assert reader.evicted()
    assert reader.available() == 2


@pytest.mark.parametrize("start", STARTS)
def test_a_writer_that_ended_has_fewer_units_left_than_were_asked_for(start: int) -> None:
    _, writer, [reader] = ring(4, start=start)
    writer.publish(3)
    assert not reader.writer_over(4)
    writer.end()
    assert [reader.writer_over(count) for count in (1, 2, 3, 4)] == [False, False, False, True]
    reader.release(3)
    assert reader.writer_over()


@pytest.mark.parametrize("ends_itself", [True, False])
def test_a_reader_that_evicts_the_writer_knows_whether_it_had_ended_itself(ends_itself: bool) -> None:
    _, writer, [reader] = ring(2)
    if ends_itself:
        writer.end()
    for _ in range(3):
        assert reader.writer_ended is ends_itself
        reader.evict_writer()


def test_what_a_writer_had_published_before_it_was_evicted_can_be_read() -> None:
    words, writer, [reader] = ring(4)
    writer.publish(2)
    reader.evict_writer()
    assert (reader.available(), reader.writer_over(), reader.writer_over(3)) == (2, False, True)
    reader.release(2)
    words.store(protocol.HEAD, protocol.word_of(2))  # the bit is lost
    assert reader.writer_over()


def test_an_end_says_that_it_sleeps_only_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "NAP_S", 1000.0)
    words, writer, [reader] = ring(1)
    for end, asleep, wakes in (
        (reader, protocol.asleep(0), writer.publish),
        (writer, protocol.WRITER_ASLEEP, reader.release),
    ):
        sleeps = Call(lambda end=end: end.poll(nap_s=None))  # type: ignore[misc]
        until(lambda asleep=asleep: words.load(asleep))  # type: ignore[misc]
        wakes()
        assert sleeps.result() is True
        assert not words.load(asleep)


def test_no_end_sleeps_on_the_word_of_an_end_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "NAP_S", 1000.0)
    _, writer, [reader] = ring(4)
    writer.publish()
    writer.end()
    assert not Call(lambda: reader.poll(2, nap_s=None)).result()
    assert reader.poll(1, nap_s=None)
