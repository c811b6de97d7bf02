"""The words of a ring in shared memory: the memory of :mod:`kvplug_shm.ring.protocol`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from kvplug.transport import Segment
from kvplug_shm.native.library import in_ns, library

_LINE: Final = 64
_WORD: Final = 8


class Words:
    """``num_words`` words from ``offset`` of a segment, each on a cache line of its own.

    After the segment was released, every call raises ValueError.
    """

    NAP_S: ClassVar[float] = 0.2
    """The longest single sleep: it bounds the delay of a lost wake-up, or of a signal just before it."""

    def __init__(self, segment: Segment, offset: int, num_words: int) -> None:
        """Raises ValueError: the words do not lie on cache lines of the segment.

        TransportError: the compiled steps are missing.
        """
        end = offset + self.size(num_words)
        if offset % _LINE or not 0 <= offset < end <= segment.nbytes:
            raise ValueError(
                f"{num_words} words at {offset} do not lie in a segment of {segment.nbytes} bytes"
            )
        self._segment = segment  # keeps it mapped
        self.steps = library()
        self.address = segment.address + offset
        self.words = segment.view[offset:end].cast("Q")[:: _LINE // _WORD]
        self.check: Callable[[], int] = self.words.__len__  # each message has five checks
        """Raises ValueError: the memory was released."""

    @staticmethod
    def size(num_words: int) -> int:
        """Bytes that so many words take."""
        return num_words * _LINE

    @classmethod
    def nap_ns(cls, seconds: float | None) -> int:
        """Nanoseconds of one sleep of so many seconds; ``None``, or more than :attr:`NAP_S`: for so long."""
        return in_ns(cls.NAP_S if seconds is None else min(max(seconds, 0.0), cls.NAP_S))

    def load(self, word: int) -> int:
        """The word. What other processes stored before it can be read from here on."""
        self.check()
        return int(self.steps.load(self.address, word))

    def store(self, word: int, value: int) -> None:
        """Store the word, and wake every thread that waits for it."""
        self.check()
        self.steps.store(self.address, word, value)

    def wait(self, word: int, seen: int, seconds: float | None) -> None:
        """Sleep until woken, unless the word's low half differs from ``seen``'s. May return spuriously."""
        self.check()
        self.steps.wait(self.address, word, seen, self.nap_ns(seconds))

    def wake(self, word: int) -> None:
        """Wake every thread that waits for the word."""
        self.check()
        self.steps.wake(self.address, word)
