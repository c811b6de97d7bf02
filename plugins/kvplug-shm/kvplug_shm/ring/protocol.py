"""The protocol of a ring: the operations of its ends on the shared words, and their order.

One writer, any number of readers, a fixed number of places. Units, which are bytes or messages, are counted
from 0, and unit ``number`` lies in place ``number % places``. The words, and which end stores them:

- ``head``, the writer: how many units were published;
- ``tail``, one for each reader, which stores it: how many units it has released;
- ``asleep``, one for each end, which stores it: it sleeps in the kernel, or is about to;
- ``evicted``, one for each reader, stored by the writer: the reader's places may be overwritten.

Head and tails are stored doubled. Bit 0 means that the end has ended: it stores nothing more, and the other
end does not wait for it. The bit is in the word that the other end waits for, because a change of that word
wakes a sleeper. When an end is evicted, the evicting process sets the bit in its place.

An evicted end that is alive may store its word once more, which clears the bit. So the writer also stores an
eviction in the word ``evicted``, before the bit; the reader loads that word after it has copied a unit, and
before it uses the copy.

Going to sleep needs no second check: the kernel compares the word with the seen value, and enqueues the
sleeper, in one step after all stores of this end. Announcing needs the fence: without it a processor may load
``asleep`` before the announcement is visible to others, and a sleeper would not be woken. All other steps are
in program order on processors with total store order, such as x86.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

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


class AtomicWords(Protocol):
    """Words of memory; each load and each store of one is atomic."""

    def __len__(self) -> int: ...
    def __getitem__(self, word: int, /) -> int: ...
    def __setitem__(self, word: int, value: int, /) -> None: ...


class Memory(Protocol):
    """The words that the ends share, with a fence, sleeping and waking."""

    @property
    def words(self) -> AtomicWords: ...

    def fence(self) -> None:
        """A full fence: earlier stores are visible to all before any later load."""

    def wait(self, word: int, seen: int, seconds: float | None) -> None:
        """Sleep until woken, unless the word differs from ``seen``. May return spuriously."""

    def wake(self, word: int) -> None:
        """Wake every thread that waits for the word."""


def word_of(count: int, *, over: bool = False) -> int:
    return count << 1 | over


def count_in(word: int) -> int:
    return word >> 1


def is_over(word: int) -> bool:
    return bool(word & OVER)


def has_room(tail_word: int, sent: int, places: int, count: int = 1) -> bool:
    """Whether this reader has released the places of the next ``count`` units."""
    return sent + count - (tail_word >> 1) <= places or bool(tail_word & OVER)


def has_come(head_word: int, read: int, count: int = 1) -> bool:
    """Whether the next ``count`` units can be read."""
    return (head_word >> 1) - read >= count


def announce(memory: Memory, word: int, value: int, sleepers: Iterable[int]) -> None:
    """Store the word that other ends wait for, and wake the sleeping ones."""
    words = memory.words
    words[word] = value
    memory.fence()
    for each in sleepers:
        if words[each]:
            memory.wake(word)
            return


def park(memory: Memory, word: int, seen: int, own: int, seconds: float | None = None) -> None:
    """Sleep until ``word`` differs from ``seen``; ``own`` is this end's word for being asleep.

    No end sleeps on the word of an end that has ended: evicting that end would not change the word.
    """
    if seen & OVER:
        return
    words = memory.words
    words[own] = 1
    try:
        memory.wait(word, seen, seconds)
    finally:
        words[own] = 0
