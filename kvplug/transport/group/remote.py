"""Access to the store of rank 0 from each of the other ranks."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from kvplug.errors import (
    ClosedError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
    WireError,
)
from kvplug.net.deadline import Deadline
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.transport.group.store import ERRORS, OK, PURPOSE

_GRACE_S = 1.0  # rank 0 answers at the deadline, and its answer may take this long to arrive


class RemoteStore:
    """Sends requests to rank 0. Each one takes an idle connection or opens a new one, so that no thread waits
    for the request of another thread."""

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
