"""The process at the other end of a pipe: whether its end can be seen, and waiting for it."""

from __future__ import annotations

import os
import select
from typing import Final

from kvplug.transport import PeerIdentity

_END_S: Final = 10.0
"""Seconds that a process may take to end after its connection did. A process that lives on without its
connection may unmap this end's memory whenever it likes."""


class PeerProcess:
    """May have this end's memory mapped for as long as it lives."""

    def __init__(self, identity: PeerIdentity) -> None:
        """Raises PeerGoneError: it has ended."""
        self._pidfd = identity.open_pidfd()
        self._is_self = identity.visible and identity.pid == os.getpid()

    @property
    def sees_death(self) -> bool:
        """Whether this end has a pidfd of the process."""
        return self._pidfd is not None

    def wait_for_end(self) -> None:
        """Wait until it has ended: the connection of a process that is killed ends before the process does.

        Returns at once if it is this process, which hands back what it has borrowed instead.
        """
        if self._pidfd is not None and not self._is_self:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(_END_S * 1000)

    def close(self) -> None:
        """Idempotent, and allowed in a forked child."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)
