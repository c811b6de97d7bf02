"""The protocol of a ring: the shared words, and the order of the operations on them (native/ring.c).

One writer, any number of readers, a fixed number of places. Units, which are bytes or messages, are counted
from 0, and unit ``number`` lies in place ``number % places``. The words, and which end stores them:

- ``head``, the writer: how many units were published;
- ``tail``, one for each reader, which stores it: how many units it has released;
- ``asleep``, one for each end, which stores it: it sleeps in the kernel, or is about to;
- ``evicted``, one for each reader, stored by the writer: the reader's places may be overwritten;
- ``jump``, of a pipe's rings only, the writer: its count when it last left out all places up to the end of
  the ring. They are published together with the next unit, and released with it, as if they were units. The
  writer stores ``jump`` before the head behind it, and has room for the next jump only after the reader has
  released this one.

Head and tails are stored doubled. Bit 0 means that the end has ended: it stores nothing more, and the other
end does not wait for it. The bit is in the word that the other end waits for, because a change of that word
wakes a sleeper. When an end is evicted, the evicting process sets the bit in its place.

An evicted end that is alive may store its word once more, which clears the bit. So the writer also stores an
eviction in the word ``evicted``, before the bit; the reader loads that word after it has copied a unit, and
before it uses the copy.

Going to sleep needs no second check: the kernel compares the word with the seen value, and enqueues the
sleeper, in one step after all stores of this end. Announcing needs the fence: without it a processor may load
``asleep`` before the announcement is visible to others, and a sleeper would not be woken. For all other steps
it is enough that loads acquire and stores release.
"""

from __future__ import annotations

from typing import Final

HEAD: Final = 0
WRITER_ASLEEP: Final = 1
OVER: Final = 1
MAX_PLACES: Final = 2**30 - 1
"""The kernel compares 32 bits. A word that an end waits for moves by twice ``places`` and bit 0."""


def tail(reader: int) -> int:
    """Index of the word."""
    return 2 + 3 * reader


def asleep(reader: int) -> int:
    """Index of the word."""
    return 3 + 3 * reader


def evicted(reader: int) -> int:
    """Index of the word."""
    return 4 + 3 * reader


def num_words(num_readers: int) -> int:
    return 2 + 3 * num_readers


def word_of(count: int, *, over: bool = False) -> int:
    return count << 1 | over


def count_in(word: int) -> int:
    return word >> 1


def is_over(word: int) -> bool:
    return bool(word & OVER)
