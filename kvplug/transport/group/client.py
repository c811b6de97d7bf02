"""The client of rank 0's store at the other ranks: a membership connection, and a pool for requests."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from kvplug.errors import ClosedError, KvplugError, PeerGoneError, TimeoutError, WireError
from kvplug.net.deadline import Deadline
from kvplug.net.fork import close_after_fork
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import dial, dial_until
from kvplug.net.trust.credentials import Credentials
from kvplug.transport.group.store import ERRORS, OK

PURPOSE = "group"
"""What a group's listener serves."""
_GRACE_S = 1.0  # rank 0 answers at the deadline; its answer may take that long to arrive


class RemoteStore:
    """Each request takes an idle connection or makes a new one, so that no thread waits for another's."""

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
        close_after_fork(self)
        connection = dial_until(contact, credentials, PURPOSE, deadline, label=label)
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
            said = peer_text(text)
            raise error(f"the group at {self._membership.peer} refused rank {self._rank}: {said}")

    def ask(self, request: tuple[Any, ...]) -> tuple[str, Any]:
        """The status and answer of a request. The last item of one that waits is how long, in seconds."""
        wait = request[-1] if request[0] in ("get", "exchange") else self._timeout_s
        deadline = Deadline.after(None if wait is None else wait + _GRACE_S)
        with self._connection(deadline) as channel:
            channel.send(request, deadline.remaining())
            return _pair(channel.recv(deadline.remaining()))

    def send(self, request: tuple[Any, ...]) -> None:
        """A request without an answer."""
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
            # The answer may still arrive: it must not be read as the answer to another request.
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
        connection = dial(self._contact, self._credentials, PURPOSE, deadline.remaining(), label=self._label)
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

    def _after_fork_in_child(self) -> None:
        self._closed = True


def _pair(answer: Any) -> tuple[str, Any]:
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str):
        return answer
    raise WireError("rank 0 answered with something else than a status and a value; same kvplug?")
