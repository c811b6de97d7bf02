"""The scheduler side's copy of one store's index, kept up to date by the store's events.

It answers questions about a prompt locally, in microseconds. These rules keep the answers right:

- *not yet*: while a snapshot is incomplete, and after a gap in the sequence, the answer is unknown;
- *the fence*: a new request sends a ping over the event channel. The store answers it in sequence with the
  events. Until the pong arrives, or a short timeout passes, the answer for that request is "not yet". So the
  request sees every page that was saved or declared before it;
- *behind for too long*: requests wait only a while for a store that does not complete its snapshot, or whose
  events have gaps again and again. Then no page counts as held until the copy is complete;
- *too large*: a copy with more pages than a store can hold is dropped, and the replica reconnects;
- *unreachable*: nothing is promised while the store is not connected. After a load stalled, or the store was
  cleared, nothing is promised until the store has answered a later ping;
- *refused*: if the two workers' pages can never match, nothing is promised until the replica reconnects.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvplug import (
    ClosedError,
    HandshakeError,
    KvplugError,
    ResourceExhaustedError,
    TimeoutError,
)
from kvplug.engine import ConnectorContext, PeerLink, PersistentLink
from kvplug.transport import (
    Deadline,
    PageEvent,
    Presence,
    Series,
    WireError,
    close_after_fork,
)
from kvplug_lookup.connector.keys import StoreHello
from kvplug_lookup.connector.page_index import PageIndex

_log = logging.getLogger(__name__)

_HELLO_S = 10.0
MAX_PROMISED = 1 << 12
"""Limit on pages in one message."""
_PING_S = 0.2
"""Timeout to send a ping: a few bytes, and at most one is unanswered."""
_MOMENT_S = 0.005
"""How long calls about a new request wait for the store's answer, in total. On one host it takes a fraction
of a millisecond, but longer if the engine's thread keeps asking: it would take the interpreter's lock from
the threads that receive it."""
_CATCH_UP_S = 30.0
"""How long requests wait for a copy that is behind. A snapshot of a million pages takes less."""
_MAX_PAGES = 1 << 23
"""Limit on pages held or coming: a gigabyte of chains, more than a store in memory can hold."""


@attrs.frozen
class Fence:
    """One request's ping. It has passed when the store has answered it, or when it expires."""

    number: int
    expires: Deadline
    blocks_until: Deadline


class Replica(PersistentLink):
    """Follows one worker's store in its own thread. Its answers are thread-safe."""

    def __init__(
        self,
        context: ConnectorContext,
        rank: int,
        name: str,
        peer: str | Mapping[int, str] | None = None,
        listener: Callable[[int, PageEvent, Series], None] | None = None,
    ) -> None:
        """
        Args:
            rank: the rank of the followed worker.
            name: its name, for messages.
            peer: its engine, as ``Peers.connect`` takes it.
            listener: receives each applied event with the rank, in the replica's thread. Must not block.
        """
        super().__init__(context, rank, "events", name=name, peer=peer, thread="kvplug-lookup-replica")
        self._listener = listener
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._index = PageIndex()
        self.link: PeerLink | None = None
        """The event channel's link while it is connected."""
        self._is_current = False
        self._has_gap = False
        """Events are missing, and the replica reconnects to get a snapshot."""
        self._is_late = Deadline.after(None)
        """Until when requests wait for a copy that is behind."""
        self._pinged = self._ponged = 0
        """Numbers of the latest fence, and of the latest answered fence."""
        self._asked = 0
        """The unanswered ping; 0: none. The next ping is sent after its answer, so a silent store costs one
        message for any number of requests."""
        self._doubted = 0
        """Nothing is promised until this ping is answered."""
        self._silent = 0
        """No request waits for the store until this ping is answered: others have waited in vain."""
        self._refused_link: PeerLink | None = None
        """The link to a store whose pages do not fit."""
        self._error: Exception | None = None
        """Why there is no link."""
        self._was_connected = False
        self.start()
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        self._closed.set()
        self._is_current = False

    # -- asked by the scheduler ----------------------------------------------------------------

    def fence(self) -> Fence:
        """Ping the store. The fence passes when this replica knows everything that the store has now."""
        with self._lock:
            self._pinged += 1
            number = self._pinged
        self._ping()
        expires = Deadline.after(self._context.options.wait_timeout_s)
        return Fence(number, expires, Deadline.after(_MOMENT_S))

    def has_passed(self, fence: Fence) -> bool:
        """Whether the store has answered. Waits a moment for the answer, once for each request."""
        self._ping(0)  # the last attempt may have failed
        with self._lock:
            while self._ponged < fence.number and self.link is not None and self._silent <= self._ponged:
                if not self._changed.wait(fence.blocks_until.remaining()):
                    break
            if self._ponged >= fence.number:
                return True
            if fence.expires.expired:
                if self._silent <= self._ponged:
                    self._context.stats.fail("match", "expired")
                self._silent = self._doubted = max(self._doubted, fence.number)
            if self._silent > self._ponged:
                return True
            # Wait for a store that is coming up, but not for one that was lost or refused us.
            return self.link is None and (self._was_connected or self._is_refused)

    @property
    def _is_refused(self) -> bool:
        return isinstance(self._error, HandshakeError | PermissionError)

    def doubt(self, *, is_silent: bool = False) -> None:
        """Promise nothing until the store has answered a ping sent after this call: it was cleared, and the
        answer arrives after the events of the clearing, or a load stalled.

        ``is_silent``: no request waits for the answer. So a store that is stopped, but not dead, costs one
        timeout, not one for each request.
        """
        with self._lock:
            self._pinged += 1
            self._doubted = self._pinged
            if is_silent:
                self._silent = self._pinged
        self._ping()

    def refuse(self) -> None:
        """Promise nothing from this store: our worker and the store's refused each other."""
        with self._lock:
            if self.link is not None and self._refused_link is not self.link:
                _log.error(
                    "no longer loading from %s: our worker and it refused each other (our worker's log has"
                    " the reason); change one of them and restart it",
                    self.name,
                )
            self._refused_link = self.link

    def expect(self, chains: Iterable[bytes], for_s: float) -> None:
        """Wait for these pages: this step declares them to the store."""
        with self._lock:
            if self.link is not None:
                self._index.expect(chains, for_s)

    def promise(self, chains: Sequence[bytes]) -> None:
        """Tell the store that our worker will load these pages, so it evicts them later. Does not wait."""
        link = self.link
        if link is None:
            return
        for at in range(0, len(chains), MAX_PROMISED):
            with contextlib.suppress(KvplugError):  # a lost promise only allows earlier eviction
                link.channel.send({"promised": b"".join(chains[at : at + MAX_PROMISED])}, timeout=0)

    def presences(self, chains: list[bytes], first: int) -> list[Presence] | None:
        """The presences of the pages from number ``first`` on, up to the first that is absent.

        ``None``: not known yet.
        """
        with self._lock:
            if self._has_gap and not self._is_late.expired:
                return None
            if self.link is None or self.link is self._refused_link or self._doubted > self._ponged:
                return []
            if not self._is_current:
                return [] if self._is_late.expired else None
            held, presence = self._index.held, self._index.presence
            asked = chains[first:] if first else chains
            if held.issuperset(asked):  # fast, and the usual case
                return [Presence.HELD] * len(asked)
            found = [Presence.HELD for _ in itertools.takewhile(held.__contains__, asked)]
            for chain in asked[len(found) :]:
                if chain in held:
                    found.append(Presence.HELD)
                    continue
                if (known := presence(chain)) is Presence.ABSENT:
                    break
                found.append(known)
            return found

    @property
    def is_cleared(self) -> bool:
        """Whether its store has taken nothing since it was cleared, or was never connected."""
        with self._lock:
            return not self._was_connected or (self._is_current and self._index.is_cleared)

    def wait_until_ready(self, deadline: Deadline) -> None:
        with self._lock:
            while not self._is_current:
                if self._error is not None and self._is_refused:
                    raise self._error
                if self._closed.is_set():
                    raise ClosedError("this connector was shut down")
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    if isinstance(self._error, ResourceExhaustedError):
                        raise self._error
                    raise TimeoutError(self._what_is_missing())

    def _what_is_missing(self) -> str:
        where = f"{self.name} at {self._context.peers.address_of(self._rank, self._peer)}"
        if self.link is None:
            return f"could not connect to {where} in time; start it, or correct its address"
        return f"{where} is connected, but did not send all of its store's index in time"

    def end(self) -> None:
        super().end()
        with self._lock:
            self._changed.notify_all()

    # -- the thread ----------------------------------------------------------------------------

    def _follow(self, link: PeerLink) -> None:
        follower = PageEvent.Follower()
        series = self._series_of(link)
        with self._lock:
            self.link, self._error, self._was_connected = link, None, True
            self._asked = 0
            if not self._has_gap:  # with a gap, it has been behind since then
                self._is_late = Deadline.after(_CATCH_UP_S)
        _log.info("following the pages of %s", self.name)
        self._ping()
        while not self._closed.is_set():
            message: Any = link.channel.recv(timeout=None)
            if isinstance(message, Mapping) and "pong" in message:
                self._note_pong(message["pong"])
                self._ping()
                continue
            event = PageEvent.from_plain(message)
            with self._lock:
                if not follower.accept(event):
                    _log.warning("events of %s have a gap: reconnecting for a snapshot", self.name)
                    if not self._has_gap and self._is_current:
                        self._is_late = Deadline.after(_CATCH_UP_S)
                    self._has_gap = True
                    return
                self._index.apply(event, series)
                if len(self._index) > _MAX_PAGES:
                    raise WireError(
                        f"the index has {len(self._index)} pages; at most {_MAX_PAGES} are allowed"
                    )
                self._is_current = follower.ready
                self._has_gap = self._has_gap and not follower.ready
                self._changed.notify_all()
            if self._listener is not None:
                self._listener(self._rank, event, series)

    def _note_pong(self, number: object) -> None:
        """Raises WireError: no such ping was sent."""
        with self._lock:
            if type(number) is not int or not 0 <= number <= self._pinged:
                raise WireError("got an answer to a ping that was not sent")
            self._ponged = max(self._ponged, number)
            self._asked = 0
            self._changed.notify_all()

    def _series_of(self, link: PeerLink) -> Series:
        """The store's series, from its first message.

        Raises:
            HandshakeError: its pages do not fit this engine.
        """
        hello = StoreHello.from_plain(link.channel.recv(timeout=_HELLO_S))
        if differences := hello.differences(self._context.model):
            raise HandshakeError(*differences, peer=self.name)
        return hello.series()

    def _ping(self, timeout: float = _PING_S) -> None:
        """Send a ping, unless one is unanswered or every fence has been answered."""
        with self._lock:
            link = self.link
            if link is None or self._asked or self._pinged <= self._ponged:
                return
            number = self._asked = self._pinged
        try:
            link.channel.send({"ping": number}, timeout=timeout)
        except KvplugError as e:
            _log.debug("could not send ping %d: %s", number, e)
            with self._lock:
                if self.link is link:
                    self._asked = 0

    def _lose(self, error: Exception | None) -> None:
        with self._lock:
            if self.link is None:
                self._has_gap = False  # the store with the missing events is gone
            self.link, self._error, self._is_current, self._asked = None, error, False, 0
            self._changed.notify_all()
