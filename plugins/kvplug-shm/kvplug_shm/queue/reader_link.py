"""One reader elsewhere, as the thread of the writer's network half knows it."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs

from kvplug.transport import PeerIdentity, Watch, WireError, watch
from kvplug_shm.queue.network import Feed
from kvplug_shm.queue.remote_frames import PIECE_BYTES, Part, Taken, frames_of
from kvplug_shm.queue.remote_thread import BEATS_IN_PATIENCE

logger = logging.getLogger(__name__)

WINDOW_BYTES: Final = 16 * PIECE_BYTES
"""Under way to one reader and not arrived: enough for a fast network, and all that a stopped one costs."""
WINDOW_FRAMES: Final = 512
BEATS: Final = 256
"""Sent at most to one from which nothing comes: with the above, far from the high-water mark."""


@attrs.define(eq=False)
class ReaderLink:
    """A reader that has joined."""

    rank: int
    routing_id: bytes
    who: PeerIdentity
    patience_s: float
    """Silence that the more impatient of the two ends takes for death."""
    heard: float
    said: float
    read: int = 0
    """Messages that it has told to be done with."""
    arrived: int = 0
    """Messages that it has whole."""
    sent: int = 0
    """Messages that were sent whole."""
    frames: Iterator[tuple[list[Part], bool]] | None = None
    """What is left of the message that is being sent."""
    unsent: tuple[list[Part], bool] | None = None
    """The frame that is next, and whether it is its message's last, once it was made."""
    answers: bool = True
    """Whether what was sent arrives; not for one that is stopped, until it catches up."""
    wants_ready: bool = False
    beats: int = 0
    """So many were sent since something came from it."""
    dying: float = 0.0
    """When its process was seen to have ended."""
    descriptor: int = -1
    """Its connection's."""
    doubted: float = 0.0
    """When a connection of that descriptor was seen to have ended."""
    suspected: float = 0.0
    """Since when it is silent for too long."""
    _frames_sent: int = 0
    _frames_arrived: int = 0
    _under_way: deque[int] = attrs.field(factory=deque)
    _bytes_under_way: int = 0
    _watch: Watch | None = None

    @property
    def watched(self) -> bool:
        """Whether its process can be seen from here: then silence is no death."""
        return self._watch is not None

    @property
    def beat_s(self) -> float:
        """So long it may be that nothing is said."""
        return self.patience_s / BEATS_IN_PATIENCE

    @property
    def progress(self) -> int:
        return self._frames_arrived

    @property
    def has_room(self) -> bool:
        return self._bytes_under_way < WINDOW_BYTES and len(self._under_way) < WINDOW_FRAMES

    @property
    def restless(self) -> bool:
        """Whether something is to be looked at again soon."""
        return bool(self.dying or self.doubted or self.suspected or self.wants_ready or self.unsent)

    def observe(self, on_gone: Callable[[], None]) -> None:
        """Call ``on_gone`` when its process ends, where that can be seen. Raises as :func:`observed`."""
        self._watch = observed(self.who, on_gone)

    def next_frame(self, feed: Feed) -> tuple[list[Part], bool]:
        """The same until it is counted. Raises as :meth:`Feed.message`."""
        if self.unsent is None:
            if self.frames is None:
                self.frames = frames_of(feed.message(self.sent), self.sent)
            self.unsent = next(self.frames)
        return self.unsent

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def count(self, parts: list[Part], last: bool) -> None:
        """A data frame was sent, the last one of its message or not."""
        self.unsent = None
        if last:
            self.sent += 1
            self.frames = None
        nbytes = sum(map(len, parts))
        self._frames_sent += 1
        self._under_way.append(nbytes)
        self._bytes_under_way += nbytes

    def take(self, taken: Taken) -> None:
        """What it says of what has arrived.

        Raises:
            WireError: that cannot be.
        """
        if not (
            self._frames_arrived <= taken.frames <= self._frames_sent
            and self.arrived <= taken.arrived <= self.sent
            and self.read <= taken.read <= taken.arrived
        ):
            raise WireError(f"it says to have taken what it cannot have: {taken}")
        for _ in range(taken.frames - self._frames_arrived):
            self._bytes_under_way -= self._under_way.popleft()
        self._frames_arrived = taken.frames
        self.arrived, self.read = taken.arrived, taken.read
        self.answers = self.answers or not self._under_way


def observed(who: PeerIdentity, on_gone: Callable[[], None]) -> Watch | None:
    """Call ``on_gone``, in the watcher's thread, when that process ends; ``None`` where it cannot be seen,
    or not be watched for want of a thread or descriptors: then silence tells.

    Raises:
        PeerGoneError: it has ended.
    """
    pidfd = who.open_pidfd()
    if pidfd is None:
        return None
    try:
        return watch(pidfd=pidfd, on_gone=lambda _: on_gone())
    except (OSError, RuntimeError) as e:
        logger.warning("the end of %s is told by its silence only, as it cannot be watched: %s", who, e)
        return None
    finally:
        os.close(pidfd)


def identity_of(plain: Any) -> PeerIdentity:
    """Who the other end says it is.

    Raises:
        WireError: it does not say so.
    """
    fields = {field.name for field in attrs.fields(PeerIdentity)}
    if not isinstance(plain, Mapping) or set(plain) != fields:
        raise WireError("the other end of the queue does not say who it is")
    numbers = ("pid", "start_time")
    for name, value in plain.items():
        if type(value) is not (int if name in numbers else str):
            raise WireError(f"the other end of the queue says that its {name} is a {type(value).__name__}")
    if not 0 < plain["pid"] < 1 << 31 or plain["start_time"] < 0:
        raise WireError(f"the other end of the queue says that its pid is {plain['pid']}")
    return PeerIdentity(**plain)
