"""Allocation of the arena for messages' bytes. Only the writer allocates and frees extents.

The lowest free place is used, so that a queue whose readers keep up reuses the same few pages, which stay in
the caches. Extents are freed in the order of their allocation.
"""

from __future__ import annotations

import bisect
from collections import deque


class Extents:
    """The extents of one stretch of the arena. :meth:`find` a place first; :meth:`hold` it on publication."""

    def __init__(self, begin: int, nbytes: int) -> None:
        self.begin = begin
        self.nbytes = nbytes
        self.high = 0
        """Bytes of the stretch that may have been written to."""
        self._spans: list[tuple[int, int]] = []
        self._held: deque[tuple[int, tuple[int, int]]] = deque()

    @property
    def empty(self) -> bool:
        return not self._spans

    def find(self, nbytes: int) -> int | None:
        """The lowest place for so many bytes; ``None`` if there is none now."""
        if not self._spans and nbytes <= self.nbytes:
            return self.begin
        at = 0
        for start, end in self._spans:
            if start - at >= nbytes:
                break
            at = end
        else:
            if self.nbytes - at < nbytes:
                return None
        return self.begin + at

    def hold(self, number: int, at: int, nbytes: int) -> None:
        """Allocate the place that :meth:`find` returned to message ``number``."""
        start = at - self.begin
        end = start + nbytes
        span = start, end
        bisect.insort(self._spans, span)
        self._held.append((number, span))
        if end > self.high:
            self.high = end

    def release(self, count: int) -> None:
        """All readers are done with the first ``count`` messages."""
        held = self._held
        while held and held[0][0] < count:
            _, span = held.popleft()
            del self._spans[bisect.bisect_left(self._spans, span)]


class Arena:
    """The whole arena: a stretch for messages that fit a chunk, which always has room for ``max_chunks`` of
    them despite fragmentation, and a stretch for larger messages.

    Sizes of messages are multiples of 64, and not 0.
    """

    def __init__(self, max_chunks: int, chunk_nbytes: int, large_nbytes: int) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._small = Extents(0, small_nbytes(max_chunks, chunk_nbytes))
        self._large = Extents(self._small.nbytes, large_nbytes)

    def find(self, nbytes: int) -> int | None:
        """The place for a message of ``nbytes``; ``None`` if there is none yet."""
        return (self._small if nbytes <= self._chunk_nbytes else self._large).find(nbytes)

    def hold(self, number: int, at: int, nbytes: int) -> None:
        (self._small if nbytes <= self._chunk_nbytes else self._large).hold(number, at, nbytes)

    def release(self, count: int) -> None:
        """All readers are done with the first ``count`` messages."""
        self._small.release(count)
        self._large.release(count)

    def spare(self, keep_nbytes: int, nbytes: int) -> tuple[int, int] | None:
        """A range (begin, bytes) to return to the system, since more than ``keep_nbytes`` were written to and
        the next message, of ``nbytes``, does not need it.

        It counts as returned from here on.
        """
        large = self._large
        if not large.high or nbytes > self._chunk_nbytes or not large.empty:
            return None
        if self._small.high + large.high <= keep_nbytes:
            return None
        spare = large.begin, large.high
        large.high = 0
        return spare


def small_nbytes(max_chunks: int, chunk_nbytes: int) -> int:
    """The size at which ``max_chunks - 1`` messages leave room for one more, wherever they lie.

    They leave ``max_chunks`` holes at most; if each hole is too small, the arena is smaller than this.
    """
    return (2 * max_chunks - 1) * chunk_nbytes
