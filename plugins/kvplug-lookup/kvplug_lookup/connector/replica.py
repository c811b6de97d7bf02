"""The scheduler side's copy of one store's index, kept up to date by the store's own events.

So a question about a prompt is answered locally, in microseconds. What keeps the answer honest:

- *not yet*: while a snapshot is incomplete, and after a gap in the sequence, it is not known what is held;
- *the fence*: a new request sends a ping down the event channel. The store answers it in line with the
  events. Until the pong is back (or a short timeout has passed) the answer for that request is "not yet"; so
  what was saved, or declared, before the request came in is always seen;
- *behind for too long*: a store that does not complete its snapshot, or whose events have gaps again and
  again, is waited for only for a while; then nothing is known to be held until the copy is complete;
- *too large*: a copy of more pages than a store can hold is given up: the store is connected to anew;
- *unreachable*: while the store cannot be reached nothing can be loaded from it; so it is after a load that
  stalled, and after the store was cleared, until the store has answered a ping sent since;
- *refused*: where the two workers' pages can never be the same, nothing is loaded until the store is
  connected to anew.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvplug import (
    ClosedError,
    HandshakeError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
)
from kvplug.engine import ModelInfo, PeerLink
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    NamedExhaustion,
    PageEvent,
    PageEventLog,
    Presence,
    Series,
    WireError,
    close_after_fork,
)
from kvplug_lookup.connector.keys import StoreHello
from kvplug_lookup.connector.page_index import PageIndex

_log = logging.getLogger(__name__)

_CONNECT_S = 10.0
"""For one try: a producer under load may take its time to shake hands."""
_RETRY_S = 1.0
_REFUSED_S = 60.0
"""The longest pause after a refused handshake; each is twice the one before."""
MAX_PROMISED = 1 << 12
"""Pages in one message."""
_PING_S = 0.2
"""A ping is a few bytes, and at most one is unanswered: there is room for it."""
_JOIN_S = 3.0
_MOMENT_S = 0.005
"""How long a question about a new request waits for the store's answer, in total. On one host that comes in a
fraction of a millisecond, but not while the engine's thread asks again and again: it would take the
interpreter's lock from the threads that bring it."""
_CATCH_UP_S = 30.0
"""How long a copy that is behind is waited for. A snapshot of a million pages takes less."""
_MAX_PAGES = 1 << 23
"""Held or coming: a gigabyte of chains, and more than the memory of a store holds."""


@attrs.frozen
class Fence:
    """One request's ping: passed when the store has answered it, or when it has waited long enough."""

    number: int
    expires: Deadline
    is_worth_a_wait: Deadline


class Replica:
    """Follows one worker's store from a thread of its own; answers from any thread."""

    def __init__(
        self,
        connect: Callable[[float], PeerLink],
        *,
        name: str,
        address_of: Callable[[], str],
        model: ModelInfo,
        wait_timeout_s: float,
        listener: Callable[[PageEvent, Series], None] | None = None,
        expired: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            name: of the worker that is followed, for messages.
            address_of: returns its address, for the message of :meth:`wait_until_ready`.
            listener: receives each event that is applied, in the replica's thread; must not block.
            expired: called when a request has waited in vain for the store's answer.
        """
        self._connect = connect
        self._name = name
        self._address_of = address_of
        self._model = model
        self._wait_timeout_s = wait_timeout_s
        self._listener = listener
        self._expired = expired
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._index = PageIndex()
        self._series: Series | None = None
        """Of the store's pages, once it has said which they are."""
        self._link: PeerLink | None = None
        self._is_current = False
        self._has_gap = False
        """Events are missing, and the store that has them is being asked for a snapshot."""
        self._is_late = Deadline.after(None)
        """When an answer that depends on a copy which is behind is not waited for any more."""
        self._pinged = self._ponged = 0
        """Numbers of the latest fence, and of the latest that was answered."""
        self._asked = 0
        """The ping that the store has not answered yet. It is asked for the next one only then, so that a
        store that does not answer costs one message, however many requests come."""
        self._doubted = 0
        """Nothing is promised until this ping is answered."""
        self._silent = 0
        """No request waits for the store until this ping is answered: others have waited in vain."""
        self._refused_link: PeerLink | None = None
        """To a store whose pages are not ours."""
        self._refusal: Exception | None = None
        self._shortage: ResourceExhaustedError | None = None
        """Why the latest try to connect failed, if a resource ran out."""
        self._has_tried = False
        """It was connected once, or refused."""
        self._was_connected = False
        self._closed = threading.Event()
        self._thread = BackgroundThread(self._run, name="kvplug-lookup-replica", stop=self.end)
        self._thread.start()
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        self._closed.set()
        self._is_current = False

    # -- asked by the scheduler ----------------------------------------------------------------

    def fence(self) -> Fence:
        """Ask the store to say when everything it has by now is known here."""
        with self._lock:
            self._pinged += 1
            number = self._pinged
        self._ping()
        return Fence(number, Deadline.after(self._wait_timeout_s), Deadline.after(_MOMENT_S))

    def has_passed(self, fence: Fence) -> bool:
        """Whether the store has answered. Waits a moment for that, once for each request."""
        self._ping(0)  # the last try may have failed
        with self._lock:
            while self._ponged < fence.number and self._link is not None and self._silent <= self._ponged:
                if not self._changed.wait(fence.is_worth_a_wait.remaining()):
                    break
            if self._ponged >= fence.number:
                return True
            if fence.expires.expired:
                if self._silent <= self._ponged:
                    self._expired()
                self._silent = self._doubted = max(self._doubted, fence.number)
            if self._silent > self._ponged:
                return True
            # A store that was there and is not, or refused us, is not waited for; one that comes up is.
            return self._link is None and self._has_tried

    def doubt(self) -> None:
        """A load stalled: promise nothing until the store has answered again.

        So a store that is stopped, which is no death, costs one timeout and not one for each request.
        """
        with self._lock:
            if self._doubted <= self._ponged:
                self._pinged += 1
                self._doubted = self._pinged
            self._silent = self._doubted
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
                    "nothing is loaded from %s any more: our worker does not agree with it (its log says"
                    " why); change one of them and restart it",
                    self._name,
                )
            self._refused_link = self._link

    def expect(self, chains: Iterable[bytes], for_s: float) -> None:
        """The store is told in this step that these pages are coming: they are waited for."""
        with self._lock:
            if self._link is not None:
                self._index.expect(chains, for_s)

    def promise(self, chains: Sequence[bytes]) -> None:
        """Our worker is going to load these pages: the store evicts them later. Does not wait."""
        link = self._link
        if link is None:
            return
        for at in range(0, len(chains), MAX_PROMISED):
            with contextlib.suppress(KvplugError):  # if it is lost, they are evicted as before
                link.channel.send({"promised": b"".join(chains[at : at + MAX_PROMISED])}, timeout=0)

    def presences(self, chains: list[bytes], first: int) -> list[Presence] | None:
        """What is known of the pages from number ``first`` on, up to the first that is absent.

        ``None``: it is not known yet.
        """
        with self._lock:
            if self._has_gap and not self._is_late.expired:
                return None
            if self._link is None or self._link is self._refused_link or self._doubted > self._ponged:
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
    def link(self) -> PeerLink | None:
        """The event channel's link, while there is one."""
        return self._link

    @property
    def is_cleared(self) -> bool:
        """Whether its store was cleared and has taken nothing since, or was never connected."""
        with self._lock:
            return not self._was_connected or (self._is_current and self._index.is_cleared)

    def wait_until_ready(self, deadline: Deadline) -> None:
        with self._lock:
            while not self._is_current:
                if self._refusal is not None:
                    raise self._refusal
                if self._closed.is_set():
                    raise ClosedError("this connector was shut down")
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    if self._shortage is not None:
                        raise self._shortage
                    raise TimeoutError(self._what_is_missing())

    def _what_is_missing(self) -> str:
        where = f"{self._name} at {self._address_of()}"
        if self._link is None:
            return f"{where} was not connected to in time; start it, or correct its address"
        return f"{where} is connected, and did not send all of its store's index in time"

    def close(self) -> None:
        self.end()
        self._thread.join(timeout=_JOIN_S)

    def end(self) -> None:
        """Follow no more, and promise nothing. Does not wait for the thread."""
        self._closed.set()
        with self._lock:
            link = self._link
            self._changed.notify_all()
        if link is not None:
            link.close()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        said, gaps, refusals = "", 0, 0
        while not self._closed.is_set():
            try:
                link = self._connect(_CONNECT_S)
            except TimeoutError:
                with self._lock:
                    self._has_gap = False  # the store that had the missing events is not there
                continue
            except ClosedError:
                return
            except Exception as e:  # out of descriptors, say, as well as what connect raises
                if str(e) != said:
                    said = str(e)
                    _log.warning("no index of %s: %s", self._name, e)
                with self._lock:
                    self._has_gap = False
                    self._shortage = NamedExhaustion.of(e, f"connecting to {self._name}")
                    if isinstance(e, HandshakeError | PermissionError):
                        self._refusal, self._has_tried = e, True
                    self._changed.notify_all()
                refusals = refusals + 1 if isinstance(e, HandshakeError) else 0
                self._closed.wait(min(_REFUSED_S, _RETRY_S * 2 ** min(refusals, 6)))
                continue
            said, refusals, began = "", 0, time.monotonic()
            try:
                self._follow(link)
            except (ClosedError, PeerGoneError) as e:
                if not self._closed.is_set():
                    _log.warning("the index of %s is lost: %s", self._name, e)
                self._lose(link)
            except Exception as e:
                _log.warning("the index of %s is lost: %s: %s", self._name, type(e).__name__, e)
                with self._lock:
                    self._shortage = NamedExhaustion.of(e, f"following {self._name}")
                self._lose(link)
                self._closed.wait(_RETRY_S)
            else:
                self._lose(link)
                gaps = gaps + 1 if time.monotonic() - began < _CATCH_UP_S else 0
                self._closed.wait(min(_RETRY_S, 0.01 * 2**gaps))

    def _follow(self, link: PeerLink) -> None:
        follower = PageEventLog.Follower()
        series = self._series_of(link)
        with self._lock:
            self._link, self._refusal, self._has_tried, self._was_connected = link, None, True, True
            self._series = series
            self._shortage = None
            self._asked = 0
            if not self._has_gap:  # else it has been behind since then
                self._is_late = Deadline.after(_CATCH_UP_S)
        _log.info("following the pages of %s", self._name)
        if self._closed.is_set():
            return
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
                    _log.warning("events of %s have a gap: starting over", self._name)
                    if not self._has_gap and self._is_current:
                        self._is_late = Deadline.after(_CATCH_UP_S)
                    self._has_gap = True
                    return
                self._index.apply(event, series)
                if len(self._index) > _MAX_PAGES:
                    raise WireError(f"the index has {len(self._index)} pages, more than any store holds")
                self._is_current = follower.ready
                self._has_gap = self._has_gap and not follower.ready
                self._changed.notify_all()
            if self._listener is not None:
                self._listener(event, series)

    def _note_pong(self, number: object) -> None:
        """Raises WireError: it answers no ping."""
        with self._lock:
            if type(number) is not int or not 0 <= number <= self._pinged:
                raise WireError("an answer came to a ping that was not sent")
            self._ponged = max(self._ponged, number)
            self._asked = 0
            self._changed.notify_all()

    def _series_of(self, link: PeerLink) -> Series:
        """The store's series, after its first words.

        Raises:
            HandshakeError: its pages cannot be ours.
        """
        hello = StoreHello.from_plain(link.channel.recv(timeout=_CONNECT_S))
        if differences := hello.differences(self._model):
            refusal = HandshakeError(*differences, peer=self._name)
            with self._lock:
                self._refusal, self._has_tried = refusal, True
                self._changed.notify_all()
            raise refusal
        return hello.series()

    def _ping(self, timeout: float = _PING_S) -> None:
        """Ask the store, unless it has still to answer or every fence has been answered."""
        with self._lock:
            link = self._link
            if link is None or self._asked or self._pinged <= self._ponged:
                return
            number = self._asked = self._pinged
        try:
            link.channel.send({"ping": number}, timeout=timeout)
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
            self._changed.notify_all()
        self._closed.wait(0.05)
