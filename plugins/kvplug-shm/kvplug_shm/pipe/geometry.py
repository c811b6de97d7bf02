"""Sizes of a ring: cache lines, the limits of its size, and the pieces in which a message is copied."""

from __future__ import annotations

from typing import Final

import attrs

from kvplug_shm.memory.copying import RELEASE_GIL_BYTES
from kvplug_shm.ring import protocol

LINE: Final = 64
SMALLEST_BYTES: Final = 1024
"""The smallest ring: the longest prefix of a tensor, and one more line."""
SMALLEST_COST: Final = 2 * LINE
"""The cost of an empty unread message, so that the number of messages is bounded too."""
LARGEST_BYTES: Final = protocol.MAX_PLACES // LINE * LINE
PAGE: Final = 4096
NUM_WORDS: Final = protocol.num_words(1) + 1
"""With the word ``jump``."""
GROWTH: Final = 8
"""How many times its usual size a ring may have."""


def lines(nbytes: int) -> int:
    """``nbytes`` rounded up to whole cache lines."""
    return (nbytes + LINE - 1) & -LINE


@attrs.frozen
class RingSizes:
    """Bytes of each of the two rings of a pipe, and of the steps in which a message is copied, so that both
    ends copy at the same time.

    Each step has a fixed cost of some microseconds. So the steps are short only where the other end waits for
    one: at the beginning, and towards the end.
    """

    nbytes: int
    window: int
    """Bytes from the ring's beginning that the sender uses while the receiver keeps pace. It uses up to
    ``nbytes`` if the receiver is not always running."""
    at_once: int
    """Bytes of the largest message that is copied as a whole, with the interpreter's lock."""
    smallest: int
    largest: int

    @classmethod
    def of(cls, slots: int, slot_bytes: int) -> RingSizes:
        window = slots * slot_bytes
        nbytes = min(GROWTH * window, LARGEST_BYTES)
        largest = max(LINE, min(slot_bytes, window // 4) & -LINE)
        smallest = max(LINE, largest // 4 & -LINE)
        at_once = min(smallest, RELEASE_GIL_BYTES)
        return cls(nbytes, window, at_once, min(smallest, 64 * 1024), min(largest, 256 * 1024))

    @property
    def segment_nbytes(self) -> int:
        """Bytes of the segment of a pipe."""
        return PAGE + 2 * -(-self.nbytes // PAGE) * PAGE
