"""The ring in its segment: the layout, and the checks of an entry before it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kvplug import ConfigError
from kvplug.transport import WireError
from kvplug_shm.queue.ring_buffer import CHUNK, VALUE, ShmRingBuffer, Sizes

SIZES = Sizes(n_reader=2, max_chunks=4, max_chunk_bytes=1 << 16, max_message_bytes=1 << 20)


@pytest.fixture
def ring() -> Iterator[ShmRingBuffer]:
    made, fd = ShmRingBuffer.create(SIZES)
    os.close(fd)
    yield made
    made.close()


def test_the_parts_of_the_segment_do_not_overlap() -> None:
    assert 0 < SIZES.num_words * 64 <= SIZES.entries_at
    assert SIZES.entries_at + SIZES.max_chunks * 64 <= SIZES.arena_at
    assert SIZES.arena_at + SIZES.arena_nbytes == SIZES.nbytes
    assert SIZES.arena_nbytes >= 7 * SIZES.chunk_nbytes + SIZES.max_message_bytes


@settings(
    deadline=None,
    max_examples=3 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5), number=st.integers(0, 2**40))
def test_no_entry_makes_a_reader_access_memory_beyond_the_arena(
    ring: ShmRingBuffer, words: list[int], number: int
) -> None:
    ring.put(*words)
    for wanted in (words[0], words[0] % SIZES.max_chunks + number * SIZES.max_chunks):
        try:
            message = ring.get(wanted)
        except WireError:
            continue
        assert words[0] == wanted and words[1] in (VALUE, CHUNK)
        assert (len(message.head), len(message.body)) == (words[3], words[4]), "it goes beyond the arena"


@pytest.mark.parametrize(
    "entry",
    [
        (4, VALUE, 0, 8, 0),
        (0, 3, 0, 8, 0),
        (0, VALUE, SIZES.arena_nbytes, 1, 0),
        (0, VALUE, 0, SIZES.arena_nbytes, 64),
        (0, CHUNK, 2**64 - 64, 0, 128),
    ],
)
def test_an_invalid_entry_is_refused(ring: ShmRingBuffer, entry: tuple[int, ...]) -> None:
    ring.put(*entry)
    with pytest.raises(WireError, match="message 0"):
        ring.get(0)


@pytest.mark.parametrize("given_sizes", [{"max_chunks": 2**30}, {"max_message_bytes": 1 << 60}])
def test_sizes_that_no_process_can_address_are_refused(given_sizes: dict[str, int]) -> None:
    usual = {"n_reader": 1, "max_chunks": 4, "max_chunk_bytes": 1024, "max_message_bytes": 1024}
    with pytest.raises(ConfigError, match="address"):
        Sizes(**{**usual, **given_sizes})
