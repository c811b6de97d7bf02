"""What the ends of a ring do to the words they share, and in which order: the whole protocol.

One writer, any number of readers, a fixed number of places. What goes through is counted in units, from 0:
bytes, or messages. Unit ``number`` lies in place ``number % places``. The words, and whose they are to store:

- ``head``, the writer's: how many units were published;
- ``tail``, one of each reader: how many it is done with;
- ``asleep``, one of each end: it waits in the kernel, or is about to;
- ``evicted``, the writer's, one for each reader: its places are not kept any more.

Head and tails are stored doubled. Bit 0 says that the end is over: nothing more comes from it, and nobody
waits for it. It is in the word that is waited for, since a change of that word is what nobody can sleep
through. Whoever gives up the end that stores the word sets the bit in its stead.

An end that was given up and is not dead may store its word once more, and the bit is lost. So the writer
notes an eviction in a word of its own, before the bit; the reader looks at that word after it has copied what
it read, and before it believes the copy.

Going to sleep needs no second look: the kernel compares the word with what was seen, and enqueues the
sleeper, in one step which comes after all that this end has stored. Announcing needs the fence: without it a
processor may look who sleeps before others can see what was announced, and nobody would wake them. All other
steps are in the order of the program on processors with total store order, as x86 has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

HEAD: Final = 0
WRITER_ASLEEP: Final = 1
OVER: Final = 1
MAX_PLACES: Final = 2**30 - 1
"""The kernel compares 32 bits. A word that somebody waits for moves by twice ``places`` and bit 0."""


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


class Words(Protocol):
    """Words of memory; each load and each store of one is atomic."""

    def __len__(self) -> int: ...
    def __getitem__(self, word: int, /) -> int: ...
    def __setitem__(self, word: int, value: int, /) -> None: ...


class Memory(Protocol):
    """The words that the ends share, and what a processor and a kernel do with them."""

    @property
    def words(self) -> Words: ...

    def fence(self) -> None:
        """What was stored before can be seen by all before anything is loaded after it."""

    def wait(self, word: int, seen: int, seconds: float | None) -> None:
        """Sleep until it is woken, unless the word is not ``seen``. May return without a reason."""

    def wake(self, word: int) -> None:
        """Everyone who waits for the word."""


def word_of(count: int, *, over: bool = False) -> int:
    return count << 1 | over


def count_in(word: int) -> int:
    return word >> 1


def is_over(word: int) -> bool:
    return bool(word & OVER)


def has_room(tail_word: int, sent: int, places: int, count: int = 1) -> bool:
    """Whether this reader leaves the places of the next ``count`` units to the writer."""
    return sent + count - (tail_word >> 1) <= places or bool(tail_word & OVER)


def has_come(head_word: int, read: int, count: int = 1) -> bool:
    """Whether the next ``count`` units can be read."""
    return (head_word >> 1) - read >= count


def announce(memory: Memory, word: int, value: int, sleepers: Iterable[int]) -> None:
    """Store what others wait for, and wake those of them who sleep."""
    words = memory.words
    words[word] = value
    memory.fence()
    for each in sleepers:
        if words[each]:
            memory.wake(word)
            return


def doze(memory: Memory, word: int, seen: int, own: int, seconds: float | None = None) -> None:
    """Sleep until ``word`` is no longer what was ``seen``; ``own`` is this end's word for being asleep.

    Nobody sleeps on the word of an end that is over: who gives it up as well does not change the word.
    """
    if seen & OVER:
        return
    words = memory.words
    words[own] = 1
    try:
        memory.wait(word, seen, seconds)
    finally:
        words[own] = 0
