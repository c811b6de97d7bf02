"""Waiting at an end of a queue, for all transports."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvplug.errors import CancelledError, TimeoutError
from kvplug.net.deadline import Deadline

logger = logging.getLogger(__name__)

WARNING_INTERVAL_S: Final = 60.0
_LOOK_AT_CANCEL_S = 0.02  # an event cannot wake a transport's own wait, so it is looked at


class Wait:
    """One blocking call of a queue's end: its deadline, its cancelling event, and the warnings it logs.

    For transports, so that all of them wait alike::

        wait = Wait("room for a message", lambda: ", ".join(map(str, slow)), deadline, interval_s)
        while not there_is_room():
            condition.wait(wait.pause())
    """

    def __init__(
        self,
        what: str,
        peers: Callable[[], str],
        deadline: Deadline,
        interval_s: float = WARNING_INTERVAL_S,
        *,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> None:
        self._what = what
        self._peers = peers
        self._deadline = deadline
        self._cancel = cancel
        self._interval_s = interval_s
        self._began = time.monotonic()
        self._warn_at = float("inf") if indefinite else self._began + interval_s

    def pause(self) -> float | None:
        """How long to sleep at most before looking again; ``None``: until woken.

        Raises:
            CancelledError: the caller's event was set.
            TimeoutError: the deadline has passed; names what the call waited for, and which peers.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise CancelledError(f"the wait for {self._what} was cancelled by its caller")
        now = time.monotonic()
        if self._deadline.expired:
            raise TimeoutError(
                f"waited {now - self._began:.3g} s for {self._what}: {self._peers()}; nothing has changed"
            )
        if now >= self._warn_at:
            logger.warning(
                "still waiting for %s after %.3g s: %s", self._what, now - self._began, self._peers()
            )
            while self._warn_at <= now:
                self._warn_at += self._interval_s
        moments = [self._warn_at, self._deadline.at]
        if self._cancel is not None:
            moments.append(now + _LOOK_AT_CANCEL_S)
        first = min(moments)
        return None if first == float("inf") else max(0.0, first - now)
