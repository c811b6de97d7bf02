"""The writer's link to one remote reader, used by the thread of the network half."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs

from kvplug.transport import PeerIdentity, Watch, WireError
from kvplug_shm.queue.network import Feed
from kvplug_shm.queue.remote_frames import PIECE_BYTES, Part, Taken, frames_of
from kvplug_shm.queue.remote_thread import BEATS_IN_PATIENCE

logger = logging.getLogger(__name__)

WINDOW_BYTES: Final = 16 * PIECE_BYTES
"""Bytes in flight to one reader: enough for a fast network, and the limit for a stopped reader."""
WINDOW_FRAMES: Final = 512
BEATS: Final = 256
"""Heartbeats sent at most to a reader that does not answer: with the above, far below the high-water mark."""


@attrs.define(eq=False)
class ReaderLink:
    """A reader that has joined."""

    rank: int
    routing_id: bytes
    who: PeerIdentity
    patience_s: float
    """Silence that counts as death: the shorter timeout of the two ends."""
    received_at: float
    sent_at: float
    read: int = 0
    """Messages that it has reported as read."""
    arrived: int = 0
    """Messages that it has reported as wholly arrived."""
    sent: int = 0
    """Messages that were wholly sent."""
    frames: Iterator[tuple[list[Part], bool]] | None = None
    """The remaining frames of the message that is being sent."""
    unsent: tuple[list[Part], bool] | None = None
    """The next frame, once it was made, and whether it is the last of its message."""
    answers: bool = True
    """Whether it reports arrivals; false for a stopped reader until it catches up."""
    wants_ready: bool = False
    beats: int = 0
    """Heartbeats sent since its last frame."""
    dying: float = 0.0
    """When its process was noticed to have ended; 0: it has not."""
    descriptor: int = -1
    """The descriptor of its connection."""
    doubted: float = 0.0
    """When the end of a connection with that descriptor was noticed."""
    suspected: float = 0.0
    """When its silence was first noticed to be too long."""
    _frames_sent: int = 0
    _frames_arrived: int = 0
    _under_way: deque[int] = attrs.field(factory=deque)
    _bytes_under_way: int = 0
    _watch: Watch | None = None

    @property
    def watched(self) -> bool:
        """Whether its process is watched: then silence does not count as death."""
        return self._watch is not None

    @property
    def beat_s(self) -> float:
        """The interval of heartbeats, in seconds."""
        return self.patience_s / BEATS_IN_PATIENCE

    @property
    def progress(self) -> int:
        return self._frames_arrived

    @property
    def has_room(self) -> bool:
        return self._bytes_under_way < WINDOW_BYTES and len(self._under_way) < WINDOW_FRAMES

    @property
    def restless(self) -> bool:
        """Whether the thread must check this link again soon."""
        return bool(self.dying or self.doubted or self.suspected or self.wants_ready or self.unsent)

    def observe(self, on_gone: Callable[[], None]) -> None:
        """Call ``on_gone`` when its process ends, if it can be watched. Raises as :func:`observed`."""
        self._watch = observed(self.who, on_gone)

    def next_frame(self, feed: Feed) -> tuple[list[Part], bool]:
        """The next frame; the same one until :meth:`count`. Raises as :meth:`Feed.message`."""
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
        """Process its report of arrivals.

        Raises:
            WireError: the report is impossible.
        """
        if not (
            self._frames_arrived <= taken.frames <= self._frames_sent
            and self.arrived <= taken.arrived <= self.sent
            and self.read <= taken.read <= taken.arrived
        ):
            raise WireError(f"its report of arrivals is impossible: {taken}")
        for _ in range(taken.frames - self._frames_arrived):
            self._bytes_under_way -= self._under_way.popleft()
        self._frames_arrived = taken.frames
        self.arrived, self.read = taken.arrived, taken.read
        self.answers = self.answers or not self._under_way


def observed(who: PeerIdentity, on_gone: Callable[[], None]) -> Watch | None:
    """Call ``on_gone``, in the watcher's thread, when that process ends. ``None`` if it cannot be watched, or
    there is no thread or descriptor left: then silence counts as death.

    Raises:
        PeerGoneError: it has ended.
    """
    pidfd = who.open_pidfd()
    if pidfd is None:
        return None
    try:
        return Watch(pidfd=pidfd, on_gone=lambda _: on_gone())
    except (OSError, RuntimeError) as e:
        logger.warning("%s cannot be watched, so only its silence will show that it has ended: %s", who, e)
        return None


def identity_of(plain: Any) -> PeerIdentity:
    """The identity that the other end states.

    Raises:
        WireError: it states none.
    """
    fields = {field.name for field in attrs.fields(PeerIdentity)}
    if not isinstance(plain, Mapping) or set(plain) != fields:
        raise WireError("the other end of the queue does not state its identity")
    numbers = ("pid", "start_time")
    for name, value in plain.items():
        if type(value) is not (int if name in numbers else str):
            raise WireError(f"the other end of the queue says that its {name} is a {type(value).__name__}")
    if not 0 < plain["pid"] < 1 << 31 or plain["start_time"] < 0:
        raise WireError(f"the other end of the queue says that its pid is {plain['pid']}")
    return PeerIdentity(**plain)
