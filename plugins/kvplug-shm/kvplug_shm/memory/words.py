"""The words of a ring in shared memory: the memory of ``ring.protocol``.

Loads and stores are of 8 aligned bytes, which processors do atomically. The ring relies on the memory order
of x86-64, where stores become visible in the order in which they were made.
"""

from __future__ import annotations

import threading
from typing import Final

from kvplug.transport import Segment
from kvplug_shm.memory import futex

_LINE: Final = 64
_WORD: Final = 8

_new_lock = threading.Lock


class Words:
    """``num_words`` words from ``offset`` of a segment, each on a cache line of its own."""

    def __init__(self, segment: Segment, offset: int, num_words: int) -> None:
        """Raises ValueError: the words do not lie on cache lines of the segment."""
        end = offset + self.size(num_words)
        if offset % _LINE or not 0 <= offset < end <= segment.nbytes:
            raise ValueError(
                f"{num_words} words at {offset} do not lie in a segment of {segment.nbytes} bytes"
            )
        self._segment = segment  # keeps it mapped
        self.address = segment.address + offset
        self.words = segment.view[offset:end].cast("Q")[:: _LINE // _WORD]

    @staticmethod
    def size(num_words: int) -> int:
        """Bytes that so many words take."""
        return num_words * _LINE

    def fence(self) -> None:
        """A full fence: earlier stores are visible to all before any later load."""
        # Acquiring a lock is one locked instruction, which is a full fence. A new lock each time: another
        # thread, a signal handler or a forked child could find an old one held.
        _new_lock().acquire()

    def wait(self, word: int, seen: int, seconds: float | None) -> None:
        """Sleep until woken, unless the word's low half differs from ``seen``'s."""
        futex.wait(self.address + word * _LINE, seen, seconds)

    def wake(self, word: int) -> None:
        """Wake every thread that waits for the word."""
        futex.wake(self.address + word * _LINE)
