"""The store "host" that another program serves, at a fixed address: connected again whenever it is lost."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from kvplug import ClosedError, ConfigError, KvplugError, PeerGoneError, TimeoutError
from kvplug.transport import BackgroundThread, Deadline, ExitGuard, JobTask, NamedExhaustion, Store
from kvplug_host.client.client import HostClient

_log = logging.getLogger(__name__)

_FIRST_S: Final = 5.0
"""How long a program that does not answer is waited for when the store is opened. One that answers may take
the usual time for what comes then: to begin with, both ends may have to import torch."""
_BACKOFF_S: Final = (0.1, 5.0)
"""After the first failure, and at most; doubled each time. Also after connections that did not last."""
_CLOSE_S: Final = 5.0


class ContactStore(HostClient):
    """Requests go to the program while it is there; while it is gone they are misses, at once."""

    def __init__(self, context: Store.Context, address: str) -> None:
        """Waits a moment for the program. If it is not there, it is tried again later.

        Raises:
            ConfigError: there is no way to connect from here.
            HandshakeError, AuthenticationError, WireError: it cannot work together with this process.
        """
        if context.connect is None:
            raise ConfigError("options.host.contact: this program has no way to connect to a store")
        self._connect = context.connect
        self.address = address
        self._wake = threading.Event()
        """Set when the connection is lost, or this end ends."""
        self._ends = threading.Event()
        self._link: Store.Link | None = None
        """A link on which the store is being opened."""
        self._was_gone = False
        """Whether it was logged that the program is gone."""
        super().__init__(context, None)
        self._thread = BackgroundThread(self._keep_open, name="kvplug-host-contact", stop=self._give_up)
        try:
            try:
                self._open(_FIRST_S)
            except (PeerGoneError, TimeoutError) as e:
                self._note_gone(e)
            with NamedExhaustion("a store in another process"):
                self._thread.start()
        except BaseException:
            self._abort()
            raise

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def medium(self) -> str:
        return "host"

    @property
    def location(self) -> str:
        return self.address

    # -- the connection ------------------------------------------------------------------------

    def _open(self, timeout: float) -> None:
        """Connect. Raises what a handshake raises.

        ``timeout``: until the other end has proved itself.
        """
        link = self._connect(self.address, timeout)
        deadline = Deadline.after(max(timeout, self._context.timeout_s))
        self._link = link
        try:
            if self._is_closed:
                link.close()
                raise ClosedError("the store is closed")
            self._connect_over(link, deadline)
        finally:
            self._link = None
        self._was_gone = False
        _log.info("the store 'host' at %s is connected", self.address)

    def _note_gone(self, error: KvplugError | None) -> None:
        was_gone, self._was_gone = self._was_gone, True
        if not was_gone and not self._is_closed and not ExitGuard.is_leaving():
            why = f": {error}" if error is not None else ""
            _log.warning("the store 'host' at %s is gone, and is tried again%s", self.address, why)

    def _lost(self, waiting: set[JobTask]) -> None:
        super()._lost(waiting)
        self._wake.set()

    def _keep_open(self) -> None:
        pause, opened_at = _BACKOFF_S[0], time.monotonic()
        while not self._is_closed:
            if self._is_connected:
                self._wake.wait()
                self._wake.clear()
                continue
            error: KvplugError | None = None
            if self._connection is not None:
                self._drop_connection()
                if time.monotonic() - opened_at > _BACKOFF_S[1]:  # else it may close each connection at once
                    pause = _BACKOFF_S[0]
            else:
                try:
                    self._open(max(_FIRST_S, self._context.timeout_s))
                    opened_at = time.monotonic()
                    continue
                except KvplugError as e:
                    error = e
                except Exception as e:  # for example a broken plugin: the next attempt may succeed
                    _log.exception("connecting to the store 'host' at %s failed", self.address)
                    error = PeerGoneError(str(e))
            self._note_gone(error)
            self._ends.wait(pause)
            pause = min(2 * pause, _BACKOFF_S[1])

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._is_closed

    def _give_up(self) -> bool:
        is_first = super()._give_up()
        self._ends.set()
        self._wake.set()
        link = self._link
        if link is not None:
            link.close()
        return is_first

    def _abort(self) -> None:
        super()._abort()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
