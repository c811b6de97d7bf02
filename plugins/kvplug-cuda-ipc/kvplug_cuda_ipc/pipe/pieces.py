"""The pieces that the peer has announced and this end has not yet taken."""

from __future__ import annotations

import threading
from collections import deque

from kvplug.transport import Deadline, Lifecycle, WireError
from kvplug_cuda_ipc.pipe.frames import MAX_PIECES, Piece, meta_of_prefix


class AnnouncedPieces:
    """In the order in which they were announced. The pipe's reader adds them, a receiver takes them."""

    def __init__(self, memory_bytes: int, lifecycle: Lifecycle) -> None:
        """``memory_bytes`` is the size of the peer's memory, in which every piece has to lie."""
        self._memory_bytes = memory_bytes
        self._lifecycle = lifecycle
        self._lock = threading.RLock()
        """Re-entrant: a handler of a signal may abort the pipe while its thread holds the lock. Code takes it
        and not the condition: Ctrl-C inside of the condition's ``__enter__`` would leave it taken."""
        self._changed = threading.Condition(self._lock)
        self._pieces: deque[Piece] = deque()
        self._unannounced = 0
        """Bytes that are still to be announced of the last message."""
        self._incomplete = 0
        """How many of the last pieces are of a message that is not wholly announced."""
        self._no_more = False
        self._stopped = False

    # -- the pipe's reader -----------------------------------------------------------------------------

    def add(self, piece: Piece) -> None:
        """The peer has announced it.

        Raises:
            WireError: it contradicts what the peer announced before, or is one too many.
        """
        with self._lock:
            if bool(piece.prefix) is bool(self._unannounced):
                raise WireError("it announces a message within another, or bytes of no message")
            if piece.prefix:
                meta = meta_of_prefix(piece.prefix)
                self._unannounced = 0 if meta is None else meta.nbytes
            if piece.nbytes > self._unannounced or (self._unannounced and not piece.nbytes):
                raise WireError(f"it announces {piece.nbytes} bytes where {self._unannounced} are left")
            if piece.offset + piece.nbytes > self._memory_bytes:
                raise WireError("it announces bytes that lie outside of its memory")
            if len(self._pieces) >= MAX_PIECES:
                raise WireError(f"it announces more than {MAX_PIECES} pieces that were not taken")
            self._unannounced -= piece.nbytes
            self._pieces.append(piece)
            self._incomplete = self._incomplete + 1 if self._unannounced else 0
            self._changed.notify_all()

    # -- how it ends, from any thread --------------------------------------------------------------------

    def expect_no_more(self) -> None:
        """The peer announces nothing more. Messages that it has wholly announced can still be taken."""
        with self._lock:
            self._no_more = True
            for _ in range(self._incomplete):
                self._pieces.pop()
            self._incomplete = 0
            self._changed.notify_all()

    @property
    def has_incomplete(self) -> bool:
        """Whether a message was announced in part."""
        with self._lock:
            return bool(self._incomplete)

    def stop(self) -> None:
        """Nothing more is taken. Wakes the threads that wait; blocks nowhere."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def wait_until_taken(self, deadline: Deadline) -> None:
        """Wait until nothing is left to take, if the peer announces nothing more; then stop."""
        with self._lock:
            while self._no_more and self._pieces and not self._stopped and not deadline.expired:
                self._changed.wait(deadline.remaining())
            self.stop()

    # -- the receiver ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises KvplugError: the pipe has ended, and how."""
        if self._stopped or self._lifecycle.broken:
            raise self._lifecycle.error()

    def oldest(self, deadline: Deadline) -> Piece | None:
        """The oldest piece, which stays. Waits for one; ``None`` at the deadline.

        Raises:
            KvplugError: none will come, and why.
        """
        with self._lock:
            while not self._pieces:
                self.check()
                if self._no_more:
                    raise self._lifecycle.error()
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    return None
            self.check()
            return self._pieces[0]

    def after(self, count: int) -> list[Piece]:
        """All but the oldest ``count``."""
        with self._lock:
            return list(self._pieces)[count:]

    def take(self, count: int) -> None:
        """Remove the oldest ``count``: they were copied. After the end there may be fewer."""
        with self._lock:
            for _ in range(min(count, len(self._pieces))):
                self._pieces.popleft()
            self._incomplete = min(self._incomplete, len(self._pieces))
            self._changed.notify_all()
