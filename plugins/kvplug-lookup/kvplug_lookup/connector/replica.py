"""The scheduler side's copy of one store's index, kept up to date by the store's own events.

So a question about a prompt is answered locally, in microseconds. What keeps the answer honest:

- *not yet*: while a snapshot is incomplete, and after a gap in the sequence, the answer is ``None``;
- *the fence*: a new request sends a ping down the event channel. The store answers it in line with the
  events, after whatever was being stored when the ping came. Until the pong is back (or a short
  timeout has passed) the answer for that request is ``None``; so what was stored before the request
  came in is always seen;
- *unreachable*: while the store cannot be reached nothing can be loaded from it, and the answer is 0;
  so it is after a load that timed out, and after the store was cleared, until the store has answered a
  ping sent since;
- *refused*: workers know more than the scheduler sides, which kernel orders their blocks, say. Where two
  of them can never agree, nothing can be loaded either, until the store is connected to anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvplug import ClosedError, HandshakeError, KvplugError, PeerGoneError, TimeoutError
from kvplug.engine import PeerLink
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    Follower,
    Removed,
    Snapshot,
    Stored,
    event_from_plain,
)
from kvplug_lookup.index import TokenIndex

_log = logging.getLogger(__name__)

_CONNECT_S = 10.0
"""For one try: a producer under load may take its time to shake hands."""
_RETRY_S = 1.0
_PING_S = 0.2
"""A ping is a few bytes, and at most one is unanswered: there is room for it."""
_JOIN_S = 3.0


@attrs.frozen
class Fence:
    """One request's ping: passed when the store has answered it, or when it has waited long enough."""

    number: int
    expires: Deadline


class Replica:
    """Follows one store from a thread of its own; answers from any thread."""

    def __init__(self, connect: Callable[[float], PeerLink], *, rank: int, fence_timeout_s: float) -> None:
        self._connect = connect
        self._rank = rank
        self._fence_timeout_s = fence_timeout_s
        self._lock = threading.Condition()
        self._index = TokenIndex()
        self._link: PeerLink | None = None
        self._is_current = False
        self._has_gap = False
        """Events are missing, and the store that has them is being asked for a snapshot."""
        self._pinged = self._ponged = 0
        """Numbers of the latest fence, and of the latest that was answered."""
        self._asked = 0
        """The ping that the store has not answered yet. It is asked for the next one only then, so that a
        store that does not answer costs one message, however many requests come."""
        self._doubted = 0
        """Nothing is promised until this ping is answered."""
        self._refused_link: PeerLink | None = None
        """To a store whose worker and ours do not agree."""
        self._refusal: Exception | None = None
        self._has_tried = False
        """It was connected once, or refused."""
        self._was_connected = False
        self._closed = threading.Event()
        self._thread = BackgroundThread(self._run, name=f"kvplug-lookup-replica-{rank}", stop=self._stop)
        self._thread.start()

    # -- asked by the scheduler ----------------------------------------------------------------

    def fence(self) -> Fence:
        """Ask the store to say when everything it has by now is known here."""
        with self._lock:
            self._pinged += 1
            number = self._pinged
        self._ping()
        return Fence(number, Deadline.after(self._fence_timeout_s))

    def has_passed(self, fence: Fence) -> bool:
        with self._lock:
            if self._ponged >= fence.number or fence.expires.expired:
                return True
            # A store that was there and is not, or refused us, is not waited for; one that comes up is.
            return self._link is None and self._has_tried

    def doubt(self) -> None:
        """A load timed out: promise nothing until the store has answered again.

        So a store that is stopped, which is no death, costs one timeout and not one for each request.
        """
        with self._lock:
            if self._doubted <= self._ponged:
                self._pinged += 1
                self._doubted = self._pinged
        self._ping()

    def drop(self) -> None:
        """The store was cleared: promise nothing until it has answered a ping that is sent from now on.

        Whether the events that say so have come or not; the answer comes after them.
        """
        with self._lock:
            self._pinged += 1
            self._doubted = self._pinged
        self._ping()

    def refuse(self) -> None:
        """Our worker and the store's cannot agree: promise nothing from this store."""
        with self._lock:
            if self._link is not None and self._refused_link is not self._link:
                _log.error(
                    "nothing is loaded from the peer engine's worker %d any more: ours does not agree with it"
                    " (its log says why); change one of them and restart it",
                    self._rank,
                )
            self._refused_link = self._link

    def match(self, token_ids: tuple[int, ...], extra: bytes) -> int | None:
        """Length of the longest prefix the store holds; ``None`` while the copy is behind."""
        with self._lock:
            if self._has_gap:
                return None
            if self._link is None or self._link is self._refused_link or self._doubted > self._ponged:
                return 0
            if not self._is_current:
                return None
            return self._index.match(token_ids, extra)

    @property
    def link(self) -> PeerLink | None:
        """The event channel's link, while there is one."""
        return self._link

    @property
    def was_connected(self) -> bool:
        """Whether there is, or ever was, such a link."""
        return self._was_connected

    def wait_until_ready(self, deadline: Deadline) -> None:
        with self._lock:
            while not self._is_current:
                if self._refusal is not None:
                    raise self._refusal
                if self._closed.is_set():
                    raise ClosedError("this connector was shut down")
                if not self._lock.wait(deadline.remaining()) and deadline.expired:
                    raise TimeoutError(f"the peer engine's worker {self._rank} did not come in time")

    def close(self) -> None:
        self._stop()
        self._thread.join(timeout=_JOIN_S)

    def _stop(self) -> None:
        self._closed.set()
        with self._lock:
            link = self._link
            self._lock.notify_all()
        if link is not None:
            link.close()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        said = ""
        while not self._closed.is_set():
            try:
                link = self._connect(_CONNECT_S)
            except TimeoutError:
                with self._lock:
                    self._has_gap = False  # whoever had the missing events is not there
                continue
            except ClosedError:
                return
            except Exception as e:  # out of descriptors, say, as well as what connect raises
                if str(e) != said:
                    said = str(e)
                    _log.warning("no index of the peer engine's worker %d: %s", self._rank, e)
                with self._lock:
                    self._has_gap = False
                    if isinstance(e, HandshakeError | PermissionError):
                        self._refusal, self._has_tried = e, True
                    self._lock.notify_all()
                self._closed.wait(_RETRY_S)
                continue
            try:
                self._follow(link)
            except (ClosedError, PeerGoneError) as e:
                if not self._closed.is_set():
                    _log.warning("the index of the peer engine's worker %d is lost: %s", self._rank, e)
                self._lose(link)
            except Exception as e:
                _log.warning(
                    "the index of the peer engine's worker %d is lost: %s: %s",
                    self._rank,
                    type(e).__name__,
                    e,
                )
                self._lose(link)
                self._closed.wait(_RETRY_S)
            else:
                self._lose(link)

    def _follow(self, link: PeerLink) -> None:
        follower = Follower()
        with self._lock:
            self._link, self._refusal, self._has_tried, self._was_connected = link, None, True, True
            self._asked = 0
        if self._closed.is_set():
            return
        self._ping()
        while not self._closed.is_set():
            message: Any = link.channel.recv(timeout=None)
            if isinstance(message, Mapping) and "pong" in message:
                with self._lock:
                    self._ponged = max(self._ponged, int(message["pong"]))
                    self._asked = 0
                self._ping()
                continue
            event = event_from_plain(message)
            with self._lock:
                if not follower.accept(event):
                    _log.warning("events of worker %d have a gap: starting over", self._rank)
                    self._has_gap = True
                    return
                match event:
                    case Snapshot():
                        self._index = TokenIndex()
                    case Stored():
                        self._index.insert(event.entry_id, event.token_ids, event.extra)
                    case Removed():
                        self._index.remove(event.entry_id)
                self._is_current = follower.ready
                self._has_gap = self._has_gap and not follower.ready
                self._lock.notify_all()

    def _ping(self) -> None:
        """Ask the store, unless it has still to answer or every fence has been answered."""
        with self._lock:
            link = self._link
            if link is None or self._asked or self._pinged <= self._ponged:
                return
            number = self._asked = self._pinged
        try:
            link.channel.send({"ping": number}, timeout=_PING_S)
        except KvplugError as e:
            _log.debug("the fence %d could not be sent: %s", number, e)
            with self._lock:
                if self._link is link:
                    self._asked = 0

    def _lose(self, link: PeerLink) -> None:
        link.close()
        with self._lock:
            self._link = None
            self._is_current = False
            self._asked = 0
            self._lock.notify_all()
        self._closed.wait(0.05)
