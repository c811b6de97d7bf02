"""A link to one worker of another engine that is made again whenever it is lost."""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Mapping
from typing import Final

from kvplug.engine.context import ConnectorContext, PeerLink
from kvplug.errors import ClosedError, HandshakeError, PeerGoneError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.threads import BackgroundThread

_log = logging.getLogger(__name__)

_CONNECT_S: Final = 10.0
"""Timeout of one attempt: an engine under load may shake hands slowly."""
_PAUSES_S: Final = (0.05, 0.5)
"""The pause doubles with each failed attempt, up to the second number."""
_REFUSED_PAUSES_S: Final = (1.0, 60.0)
"""The same after a refused handshake: only a restart of one of the two engines can help."""
_LASTING_S: Final = 30.0
"""A link that lasted this long counts as a success."""
_JOIN_S: Final = 3.0


class PersistentLink(abc.ABC):
    """Connects to one worker of another engine from its own thread, and again after each loss.

    Law. One attempt or link at a time. After each failure the next attempt waits longer. The thread ends when
    :meth:`end` or ``Peers.close`` is called.

    Callers. ``start`` once, when the object is complete; ``end`` and ``close`` from any thread. The thread
    calls ``_follow`` with each new link, and ``_lose`` after each link and each failed attempt. A subclass
    implements these two.
    """

    def __init__(
        self,
        context: ConnectorContext,
        rank: int,
        purpose: str,
        *,
        name: str,
        peer: str | Mapping[int, str] | None,
        thread: str,
    ) -> None:
        """
        Args:
            rank: the rank of the worker.
            purpose: see :meth:`Peers.connect`.
            name: what the link leads to, for messages.
            peer: the worker's engine, see :meth:`Peers.connect`.
            thread: the name of the thread.
        """
        self._context = context
        self._rank = rank
        self._purpose = purpose
        self.name = name
        """What the link leads to, for messages."""
        self._peer = peer
        self._closed = threading.Event()
        self._latest: PeerLink | None = None
        self._thread = BackgroundThread(self._run, name=thread, stop=self.end)

    @abc.abstractmethod
    def _follow(self, link: PeerLink) -> None:
        """Use a new link. It is closed when this returns or raises. Errors are logged."""

    @abc.abstractmethod
    def _lose(self, error: Exception | None) -> None:
        """Note that there is no link. ``error``: why an attempt failed, or why :meth:`_follow` ended; a
        :class:`~kvplug.ResourceExhaustedError` if this process or the peer's lacked a resource; ``None`` if
        :meth:`_follow` returned."""

    def start(self) -> None:
        """Raises RuntimeError: no more threads can be started now."""
        self._thread.start()

    def end(self) -> None:
        """Close the link, and make no others. Does not wait for the thread."""
        self._closed.set()
        if (link := self._latest) is not None:
            link.close()

    def close(self) -> None:
        """:meth:`end`, then wait briefly for the thread. Idempotent."""
        self.end()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        logged, failures = "", 0
        while not self._closed.is_set():
            began, link, error = time.monotonic(), None, None
            try:
                link = self._latest = self._context.peers.connect(
                    self._rank, self._purpose, timeout=_CONNECT_S, retry=False, peer=self._peer
                )
                logged = ""
                if not self._closed.is_set():  # otherwise end() may have missed this link
                    self._follow(link)
            except Exception as e:  # also exhausted descriptors, for example
                if link is None and isinstance(e, ClosedError):
                    return
                error = NamedExhaustion.of(e, f"connecting to {self.name}") or e
            finally:
                if link is not None:
                    link.close()
            if error is not None and str(error) != logged and not self._closed.is_set():
                logged = str(error)
                is_down = link is None and isinstance(error, PeerGoneError | TimeoutError)
                _log.log(
                    logging.INFO if is_down else logging.WARNING,  # it may not be up yet
                    "%s %s: %s",
                    "cannot reach" if link is None else "lost",
                    self.name,
                    error,
                )
            self._lose(error)
            failures = 0 if time.monotonic() - began >= _LASTING_S else failures + 1
            is_refused = isinstance(error, HandshakeError)
            first, longest = _REFUSED_PAUSES_S if is_refused else _PAUSES_S
            self._closed.wait(min(longest, first * 2 ** min(failures, 10)))
