"""Makes a pipe out of a proven connection. The two ends exchange descriptions of themselves. An end that
fails sends the reason to the other one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import attrs

from kvplug.errors import KvplugError, PeerGoneError, ResourceExhaustedError, TransportError, WireError
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.liveness import Watch
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.wire.records import from_plain, to_plain

_HANG_UP_S: Final = 0.2
T = TypeVar("T", bound=attrs.AttrsInstance)

_SHORTEST_SILENCE_S: Final = 0.05
"""The shortest silence that may count as death, even if both ends ask for less: each heartbeat wakes both
ends."""
_FAILURE_S: Final = 0.5
"""How many seconds the peer may take to read the reason of a failure."""


@attrs.frozen
class _Introduction:
    sees_death: bool
    heartbeat_ms: int
    own: dict[str, Any]

    def __attrs_post_init__(self) -> None:
        if self.heartbeat_ms <= 0:
            raise ValueError("heartbeat_ms is not positive")


@attrs.frozen
class _Failure:
    failed: str
    lacks: str = ""


class PipeJoin:
    """A pipe that is being made: a channel to the peer, and the terms that both ends have agreed on."""

    def __init__(self, connection: Connection, heartbeat_timeout_s: float, deadline: Deadline) -> None:
        """Call :meth:`over` instead."""
        self.peer: Final = connection.describe
        """Names the peer in errors."""
        self.deadline: Final = deadline
        self.silence_s: float | None = None
        """Seconds of silence that count as the peer's death. ``None``: silence does not count, since each end
        watches the other's process. Set by :meth:`exchange`."""
        self.give_up: Callable[[], object] = self._hang_up
        """Called if the pipe cannot be made, after the reason was sent to the peer."""
        # The channel has its own socket, because ``over`` closes the connection in any case.
        self.channel: Final = Channel(connection.dup(), timeout_s=None)
        try:
            self.pidfd = connection.peer.open_pidfd()
            """A pidfd of the peer's process, or ``None`` if none can be opened. The pipe takes it over."""
        except BaseException:
            self.channel.close()
            raise
        self._terms = Watch.Terms.of(heartbeat_timeout_s, sees_death=self.pidfd is not None)

    @classmethod
    @contextlib.contextmanager
    def over(
        cls, connection: Connection, heartbeat_timeout_s: float, deadline: Deadline
    ) -> Iterator[PipeJoin]:
        """Take over the connection and yield the join. If the block raises, send the reason to the peer and
        close everything.

        Raises:
            TimeoutError, PeerGoneError, WireError: the peer did not answer in time, is gone, or sent an
                invalid value.
            TransportError: one end failed; the error says why.
            ResourceExhaustedError: one of the two processes has no free descriptor, thread or memory for the
                pipe.
        """
        try:
            with NamedExhaustion(f"making a pipe with {connection.describe}"):
                join = cls(connection, heartbeat_timeout_s, deadline)
                try:
                    yield join
                except BaseException as e:
                    join.fail(e)
                    join.give_up()
                    raise
        except ResourceExhaustedError as e:
            connection.decline(e)
            raise
        finally:
            connection.close()

    def exchange(self, kind: type[T], make: Callable[[], T], *, accepted: bool) -> T:
        """Send the record that ``make`` returns, and return the peer's record, of class ``kind``. The
        accepting end calls ``make``, which may allocate memory, only after it has received the connecting
        end's record.
        """
        theirs = self._introduced() if accepted else None
        terms = self._terms
        ours = _Introduction(terms.sees_death, terms.heartbeat_ms, to_plain(make()))
        self.send(to_plain(ours))
        theirs = theirs or self._introduced()
        agreed = terms.agreed(Watch.Terms(theirs.sees_death, theirs.heartbeat_ms))
        self.silence_s = agreed.silence_s(terms.heartbeat_ms / 1000, at_least_s=_SHORTEST_SILENCE_S)
        return from_plain(theirs.own, kind, f"{self.peer} does not join as this version does")

    def _introduced(self) -> _Introduction:
        return from_plain(self.receive(), _Introduction, f"{self.peer} does not join as this version does")

    def send(self, value: Any) -> None:
        """Send a value. Raises as :meth:`kvplug.transport.Channel.send`."""
        self.channel.send(value, timeout=self.deadline.remaining())

    def receive(self, seconds: float | None = None) -> Any:
        """Receive the next value, within ``seconds`` if given.

        Raises:
            TransportError, ResourceExhaustedError: the peer has failed; the error says why.
            TimeoutError, PeerGoneError, WireError: as :meth:`kvplug.transport.Channel.recv`.
        """
        left = self.deadline.remaining()
        if seconds is not None:
            left = seconds if left is None else min(seconds, left)
        value = self.channel.recv(left)
        if isinstance(value, dict) and "failed" in value:
            failure = from_plain(value, _Failure, self.peer)
            why = f"{self.peer} cannot be the other end of a pipe: {peer_text(failure.failed)}"
            if failure.lacks:
                raise ResourceExhaustedError(why, resource=peer_text(failure.lacks))
            raise TransportError(why)
        return value

    def confirm(self) -> None:
        """Inform the peer that this end is ready, and wait until the peer is."""
        self.send(True)
        if self.receive() is not True:
            raise WireError(f"{self.peer} does not join as this version does")

    def fail(self, error: BaseException) -> None:
        """Send the peer the reason why the pipe cannot be made, unless the peer itself is the reason."""
        shortage = NamedExhaustion.of(error, "making a pipe")
        shown = shortage or error
        if isinstance(shown, KvplugError) and not isinstance(shown, PeerGoneError | WireError):
            failure = _Failure(str(shown), shortage.resource if shortage is not None else "")
            with contextlib.suppress(KvplugError):
                self.channel.send(to_plain(failure), timeout=_FAILURE_S)

    def _hang_up(self) -> None:
        """Wait until the peer has closed the channel, then close it. If this end closed it with unread bytes,
        the peer might not receive the last value."""
        deadline = Deadline.after(_HANG_UP_S)
        with contextlib.suppress(KvplugError):
            while True:
                self.channel.recv(deadline.remaining())
        self.close()

    def close(self) -> None:
        """Close the channel and the pidfd. Idempotent."""
        self.channel.close()
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)
