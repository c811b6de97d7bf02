"""Where messages lie: never on each other, as low as can be, and always somewhere."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings, strategies as st

from kvplug.net.wire import aligned
from kvplug_shm.queue.extents import Arena, small_nbytes

CHUNK = 1024


@settings(deadline=None, max_examples=3 * settings.default.max_examples)
@given(
    max_chunks=st.integers(1, 6),
    steps=st.lists(st.tuples(st.integers(0, CHUNK), st.integers(0, 6)), max_size=80),
)
def test_messages_that_fit_a_chunk_always_find_a_place(max_chunks: int, steps: list[tuple[int, int]]) -> None:
    arena = Arena(max_chunks, CHUNK, 0)
    held: deque[tuple[int, int, int]] = deque()
    for number, (nbytes, read) in enumerate(steps):
        while len(held) >= max_chunks or (read and held):
            arena.release(held.popleft()[0] + 1)
            read -= 1
        nbytes = aligned(nbytes or 1)
        at = arena.find(nbytes)
        assert at is not None, f"{len(held)} of {max_chunks} messages leave no room for {nbytes} bytes"
        end = at + nbytes
        assert at >= 0 and end <= small_nbytes(max_chunks, CHUNK)
        for _, begin, stop in held:
            assert end <= begin or stop <= at, "two messages lie on each other"
        arena.hold(number, at, nbytes)
        held.append((number, at, end))


def test_a_larger_message_takes_nothing_from_those_that_fit_a_chunk() -> None:
    arena = Arena(2, CHUNK, 8 * CHUNK)
    large = [arena.find(4 * CHUNK)]
    arena.hold(0, 3 * CHUNK, 4 * CHUNK)
    large.append(arena.find(4 * CHUNK))
    assert large == [3 * CHUNK, 7 * CHUNK]
    assert arena.find(5 * CHUNK) is None
    assert arena.find(CHUNK) == 0
    arena.release(1)
    assert arena.find(8 * CHUNK) == 3 * CHUNK
    assert arena.find(9 * CHUNK) is None


def test_what_large_messages_took_is_spare_when_they_have_been_read_and_it_is_too_much() -> None:
    arena = Arena(2, CHUNK, 8 * CHUNK)
    arena.hold(0, 3 * CHUNK, 6 * CHUNK)
    assert arena.spare(4 * CHUNK, CHUNK) is None, "it was not read"
    arena.release(1)
    assert arena.spare(6 * CHUNK, CHUNK) is None, "it is not too much"
    assert arena.spare(5 * CHUNK, 2 * CHUNK) is None, "the next message needs it"
    assert arena.spare(5 * CHUNK, CHUNK) == (3 * CHUNK, 6 * CHUNK)
    assert arena.spare(0, CHUNK) is None, "it was given back already"
