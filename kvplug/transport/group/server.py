"""Rank 0 at work: the store, and a thread for each connection to it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from kvplug.errors import CapacityError, ClosedError, KvplugError, PeerGoneError, WireError
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.identity import this_process
from kvplug.net.trust.listener import Listener
from kvplug.transport.acceptor import Acceptor, hang_up
from kvplug.transport.group.store import OK, Store

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 30.0
_LAST_ANSWERS_S = 1.0
_CONNECTIONS_PER_RANK = 256
"""Served at once, each in a thread: a rank has one, and one for each of its threads that waits."""


class StoreServer:
    """Serves a :class:`Store` at a listener, which it takes over.

    A rank's first connection is its membership: it joins there and then only holds it open, so that its end
    (by pidfd, hang-up, or TCP's probes of an idle line) is the rank's end. Requests come over others.
    """

    def __init__(self, listener: Listener | None, world_size: int, label: str) -> None:
        """Takes over the listener, also if it raises.

        Raises:
            ResourceExhaustedError: the process can start no more threads, or has no free descriptor.
        """
        self.store = Store(world_size)
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._answers = 0
        self._acceptor: Acceptor[None] | None = None
        close_after_fork(self)
        try:
            with NamedExhaustion("serving a group"):
                self.store.add_self(this_process(label))
                if listener is not None:
                    self._acceptor = Acceptor(
                        [listener],
                        self._serve,
                        what="the group",
                        name="kvplug-group",
                        max_served=_CONNECTIONS_PER_RANK * world_size,
                        end=self._end,
                    )
        except BaseException:
            if listener is not None:
                listener.close()
            raise

    def _end(self, connection: Connection) -> None:
        """End the thread of a connection, also one that waits for another rank."""
        self.store.close()
        hang_up(connection)

    def _serve(self, connection: Connection) -> None:
        with Channel(connection, timeout_s=_ANSWER_TIMEOUT_S) as channel:
            try:
                match channel.recv():
                    case ("join", int(rank), int(world_size)):
                        self._membership(channel, rank, world_size)
                    case ("ask", int(rank)):
                        self._requests(channel, rank)
                    case _:
                        raise WireError("neither joins nor asks")
            except (ClosedError, PeerGoneError):
                pass
            except KvplugError as e:
                logger.warning("a connection of %s to the group ends: %s", channel.peer, e)

    def _membership(self, channel: Channel, rank: int, world_size: int) -> None:
        try:
            self.store.join(rank, world_size, channel.peer)
        except WireError as e:
            channel.send(("refused", str(e)))
            return
        absent = "is gone"
        try:
            channel.send((OK, None))
            if channel.recv(None) == ("leave",):
                absent = "has left"
        finally:
            self.store.part(rank, absent)

    def _requests(self, channel: Channel, rank: int) -> None:
        if not self.store.is_member(rank, channel.peer):
            channel.send(("refused", f"{channel.peer} is not rank {rank} of this group"))
            return
        channel.send((OK, None))
        while True:
            request = channel.recv(None)
            with self._answering():
                answer = self.store.answer(rank, request)
                if type(request) is tuple and request[:1] == ("taken",):
                    continue
                try:
                    channel.send(answer)
                except CapacityError as e:
                    channel.send(("large", f"the answer is too large: {e}"))

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        with self._lock:
            self._answers += 1
        try:
            yield
        finally:
            with self._lock:
                self._answers -= 1
                self._answered.notify_all()

    def ask(self, request: tuple[Any, ...]) -> tuple[str, Any]:
        """A request of rank 0 itself."""
        return self.store.answer(0, request)

    def send(self, request: tuple[Any, ...]) -> None:
        """The same for a request without an answer."""
        self.store.answer(0, request)

    def close(self, deadline: Deadline) -> None:
        """Wait until the others have fetched their values, or the deadline; then end all threads."""
        self.store.drain(deadline)
        self.store.close()
        with self._lock:
            # Ranks that waited receive the reason now.
            self._answered.wait_for(lambda: not self._answers, _LAST_ANSWERS_S)
        if self._acceptor is not None:
            self._acceptor.close()

    def _after_fork_in_child(self) -> None:
        """The acceptor and its channels close themselves."""
