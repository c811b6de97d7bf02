"""Whether anything still comes from the peer that loads come from."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from kvplug.transport import Deadline


class StallClock:
    """The time since something came, for all loads over one connection.

    They come one after the other, so a load that waits for its turn progresses with the one before it. The
    time that this end takes for what has come (hashing, waiting for the device, copying) is no stall.

    One thread works; any thread may ask, without waiting.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._latest = -math.inf
        self._is_working = False

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Something has come, and this end works on it while the block runs."""
        self._is_working = True
        try:
            yield
        finally:
            self._latest = time.monotonic()  # before the flag, which others read first
            self._is_working = False

    def deadline(self, since: float) -> Deadline:
        """When a load that was asked for at ``since`` (monotonic seconds) has stalled if nothing comes."""
        if self._is_working:
            return Deadline.after(self.timeout_s)
        return Deadline(max(since, self._latest) + self.timeout_s)
