"""Access to rank 0's store: the server at rank 0, and the client at each of the other ranks."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from kvplug.errors import (
    CapacityError,
    ClosedError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
    WireError,
)
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.trust.listener import Listener
from kvplug.transport.acceptor import Acceptor, hang_up
from kvplug.transport.group.store import ERRORS, OK, Store

logger = logging.getLogger(__name__)

PURPOSE = "group"
"""The purpose of a group's listener."""
_ANSWER_TIMEOUT_S = 30.0
_LAST_ANSWERS_S = 1.0
_GRACE_S = 1.0  # rank 0 answers at the deadline, and its answer may take this long to arrive
_CONNECTIONS_PER_RANK = 256
"""The most connections per rank that are served at once, each in a thread. A rank has one connection for its
membership, and one for each of its threads that waits."""


class StoreServer:
    """Serves a :class:`Store` at a listener, which it takes over.

    A rank's first connection is its membership. The rank joins over it and then only holds it open: when this
    connection ends (seen by pidfd, hang-up, or TCP's keep-alive probes), the rank has ended. Requests arrive
    over other connections.
    """

    def __init__(self, listener: Listener | None, world_size: int, label: str) -> None:
        """Take over the listener, even if this raises.

        Raises:
            ResourceExhaustedError: the process can start no more threads, or has no free descriptor.
        """
        self.store = Store(world_size)
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._answers = 0
        self._acceptor: Acceptor[None] | None = None
        try:
            with NamedExhaustion("serving a group"):
                self.store.add_self(PeerIdentity.of_this_process(label))
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
        """End the thread of a connection, even if it waits for another rank."""
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
                        raise WireError("the first message must be 'join' or 'ask'")
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
            with self._lock:
                self._answers += 1
            try:
                answer = self.store.answer(rank, request)
                if type(request) is tuple and request[:1] == ("taken",):
                    continue
                try:
                    channel.send(answer)
                except CapacityError as e:
                    channel.send(("large", f"the answer is too large: {e}"))
            finally:
                with self._lock:
                    self._answers -= 1
                    self._answered.notify_all()

    def ask(self, request: tuple[Any, ...]) -> tuple[str, Any]:
        """Return the status and answer of a request of rank 0 itself."""
        return self.store.answer(0, request)

    def send(self, request: tuple[Any, ...]) -> None:
        """Perform a request of rank 0 that has no answer."""
        self.store.answer(0, request)

    def close(self, deadline: Deadline) -> None:
        """Wait until the other ranks have fetched their values, at most until the deadline. Then end all
        threads."""
        self.store.drain(deadline)
        self.store.close()
        with self._lock:
            # Ranks that were waiting now receive the reason.
            self._answered.wait_for(lambda: not self._answers, _LAST_ANSWERS_S)
        if self._acceptor is not None:
            self._acceptor.close()


class RemoteStore:
    """The client. Each request takes an idle connection or opens a new one, so that no thread waits for the
    request of another thread."""

    def __init__(
        self,
        contact: str,
        credentials: Credentials,
        rank: int,
        world_size: int,
        label: str,
        deadline: Deadline,
        timeout_s: float | None,
    ) -> None:
        self._contact = contact
        self._credentials = credentials
        self._rank = rank
        self._label = label
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._channels: set[Channel] = set()
        self._closed = False
        connection = Connection.dial_until(contact, credentials, PURPOSE, deadline, label=label)
        self._membership = Channel(connection, timeout_s=timeout_s)
        try:
            self._greet(self._membership, ("join", rank, world_size), deadline)
        except BaseException:
            self._membership.close()
            raise

    def _greet(self, channel: Channel, greeting: tuple[Any, ...], deadline: Deadline) -> None:
        channel.send(greeting, deadline.remaining())
        status, text = _pair(channel.recv(deadline.remaining()))
        if status != OK:
            error = ERRORS.get(status, WireError)
            reason = peer_text(text)
            raise error(f"the group at {self._membership.peer} refused rank {self._rank}: {reason}")

    def ask(self, request: tuple[Any, ...]) -> tuple[str, Any]:
        """Send a request and return its status and answer. If the request waits, its last item is the timeout
        in seconds."""
        wait = request[-1] if request[0] in ("get", "exchange") else self._timeout_s
        deadline = Deadline.after(None if wait is None else wait + _GRACE_S)
        with self._connection(deadline) as channel:
            channel.send(request, deadline.remaining())
            return _pair(channel.recv(deadline.remaining()))

    def send(self, request: tuple[Any, ...]) -> None:
        """Send a request that has no answer."""
        with contextlib.suppress(KvplugError), self._connection(Deadline.after(_GRACE_S)) as channel:
            channel.send(request, _GRACE_S)

    @contextlib.contextmanager
    def _connection(self, deadline: Deadline) -> Any:
        with self._lock:
            if self._closed:
                raise ClosedError("the group is closed")
            channel = self._idle.pop() if self._idle else None
        store = f"rank 0 ({self._membership.peer}), which keeps the group's store,"
        try:
            if channel is None:
                channel = self._open(deadline)
            yield channel
        except BaseException as e:
            # The answer may still arrive, and must not be taken for the answer to another request.
            if channel is not None:
                self._discard(channel)
            if self._closed:
                raise ClosedError("the group is closed") from e
            if isinstance(e, TimeoutError):
                raise TimeoutError(f"{store} did not answer in time") from e
            if isinstance(e, PeerGoneError):
                raise PeerGoneError(f"{store} is gone") from e
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(channel)

    def _open(self, deadline: Deadline) -> Channel:
        connection = Connection.dial(
            self._contact, self._credentials, PURPOSE, deadline.remaining(), label=self._label
        )
        channel = Channel(connection, timeout_s=self._timeout_s)
        with self._lock:
            if self._closed:
                channel.close()
                raise ClosedError("the group is closed")
            self._channels.add(channel)
        try:
            self._greet(channel, ("ask", self._rank), deadline)
        except BaseException:
            self._discard(channel)
            raise
        return channel

    def _discard(self, channel: Channel) -> None:
        with self._lock:
            self._channels.discard(channel)
        channel.close()

    def close(self, deadline: Deadline) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels)
            self._channels.clear()
            self._idle.clear()
        with contextlib.suppress(KvplugError):
            self._membership.send(("leave",), min(1.0, deadline.remaining() or 0.0))
        for channel in (self._membership, *channels):
            channel.close()


def _pair(answer: Any) -> tuple[str, Any]:
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str):
        return answer
    raise WireError("rank 0 did not answer with a status and a value; do both use the same kvplug?")
