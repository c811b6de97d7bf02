"""The agreement of a pipe's two ends on how they notice each other's death, and the watch that follows.

An end that has a pidfd of the other's process sees it end. If one of the two has none, on different hosts or
in different pid namespaces, both send heartbeats, and silence counts as death. The shorter timeout of the two
ends is used, so that both send often enough.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Final, Self

import attrs

from kvplug.net.liveness import Heartbeat, Watch, watch

BEATS_PER_TIMEOUT: Final = 5
"""How many heartbeats an end sends in the silence that would count as its death."""
_MAX_MS: Final = 2**32 - 1
"""What fits the field of a join message."""


@attrs.frozen
class HeartbeatTerms:
    """The terms of one end when it joins; :meth:`agreed` computes those that hold for both.

    >>> ours, theirs = HeartbeatTerms.of(10.0, sees_death=True), HeartbeatTerms.of(4.0, sees_death=False)
    >>> ours.agreed(theirs).silence_s()
    4.0
    """

    sees_death: bool
    """The end has a pidfd of the other; agreed: both have, so no heartbeats are needed."""
    heartbeat_ms: int
    """Milliseconds of silence that count as death for this end, where heartbeats are needed."""

    @classmethod
    def of(cls, timeout_s: float, *, sees_death: bool) -> Self:
        """Of an end whose config has ``timeout_s`` as its ``heartbeat_timeout_s``."""
        return cls(sees_death, max(1, min(int(timeout_s * 1000), _MAX_MS)))

    def agreed(self, theirs: HeartbeatTerms) -> HeartbeatTerms:
        """The terms of both ends together. Symmetric."""
        return HeartbeatTerms(
            self.sees_death and theirs.sees_death, min(self.heartbeat_ms, theirs.heartbeat_ms)
        )

    def silence_s(self, timeout_s: float | None = None, *, at_least_s: float = 0.0) -> float | None:
        """Seconds of silence that count as death; ``None``: both ends have a pidfd and send no heartbeats.

        At most ``timeout_s``, which milliseconds round.
        """
        if self.sees_death:
            return None
        agreed_s = self.heartbeat_ms / 1000
        return max(at_least_s, agreed_s if timeout_s is None else min(agreed_s, timeout_s))

    def interval_s(self, timeout_s: float, *, at_least_s: float) -> float | None:
        """Seconds between two heartbeats of one end; ``None``: it sends none. For :func:`watch_peer`."""
        silence_s = self.silence_s(timeout_s)
        return None if silence_s is None else max(at_least_s, silence_s / BEATS_PER_TIMEOUT)


def watch_peer(
    sock: socket.socket,
    *,
    pidfd: int | None,
    interval_s: float | None,
    timeout_s: float,
    on_gone: Callable[[str], None],
) -> Watch:
    """Watch the peer by its ``pidfd`` and its connection. Owns the pidfd from here on, also if it raises.

    Args:
        sock: A connection to the peer that carries nothing else if ``interval_s`` is given.
        interval_s: Seconds between heartbeats on that connection; ``None``: there are none, and it is only
            looked at for the peer hanging up.
        timeout_s: Seconds of silence that count as death, with heartbeats.
        on_gone: Called once with the reason, in the watcher's thread; it must not block.

    Raises:
        ValueError, ClosedError: as :func:`kvplug.transport.watch`.
    """
    try:
        beat = None if interval_s is None else Heartbeat(sock, interval_s=interval_s, timeout_s=timeout_s)
        return watch(pidfd=pidfd, sock=None if beat else sock, heartbeat=beat, on_gone=on_gone)
    finally:
        if pidfd is not None:
            os.close(pidfd)  # the watch has its own
