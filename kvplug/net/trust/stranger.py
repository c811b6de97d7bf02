"""A connection at a listener that has not proved itself yet: its TLS handshake, then its challenge.

Nothing here blocks. The listener calls :meth:`Stranger.hear` whenever something has arrived.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping

from kvplug.errors import ResourceExhaustedError
from kvplug.net.trust.challenge import MAGIC, Mode, Refusal, RefusedError, ServerChallenge
from kvplug.net.trust.peercred import same_user
from kvplug.net.trust.tls import binding_of, reason_of

_TLS_RECORD = 0x16
"""The first byte of a client that speaks TLS."""


class AskTablesError(Exception):
    """Only the kernel's tables show which user the connection belongs to; reading them takes time."""


class Stranger:
    """One connection, in non-blocking mode.

    ``uid`` is that of its process; ``None``: unknown. ``ask_uid``: it was not asked for yet, and then
    :meth:`hear` raises :class:`AskTablesError` where the mode needs it. ``tls`` is the context of a listener
    that uses TLS.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        purpose: str,
        keys: Mapping[Mode, bytes],
        identity: Callable[[], bytes],
        deadline: float,
        uid: int | None,
        ask_uid: bool,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.sock = sock
        self.deadline = deadline
        self.uid = uid
        self.ask_uid = ask_uid
        self.shortage: ResourceExhaustedError | None = None
        """Why its user could not be asked for."""
        self._purpose = purpose
        self._keys = keys
        self._identity = identity
        self._tls = tls
        self._challenge: ServerChallenge | None = None
        self._received = bytearray()
        self._spoke = False
        """Whether its first message was complete: later ones may begin with any byte."""

    @property
    def challenge(self) -> ServerChallenge:
        """Its peer and mode are known once :meth:`hear` has returned true."""
        if self._challenge is None:
            self._challenge = ServerChallenge(
                self._purpose,
                self._keys,
                self._identity(),
                self.attest,
                binding_of(self.sock) if isinstance(self.sock, ssl.SSLSocket) else b"",
            )
        return self._challenge

    def hear(self) -> bool:
        """Read and answer what has arrived. Returns whether the connection has proved itself.

        Raises:
            RefusedError: it is refused.
            AskTablesError: call again with :attr:`uid` set.
        """
        try:
            if self._tls is not None and not self._shake_hands(self._tls):
                return False
            while self.challenge.peer is None:
                if not self._step(self.challenge):
                    return False
            return True
        except (RefusedError, AskTablesError):
            raise
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except ResourceExhaustedError as e:
            raise RefusedError.for_lack(e) from e
        except ssl.SSLError as e:
            raise RefusedError(Refusal.TLS_FAILED, reason_of(e)) from e
        except OSError as e:
            raise RefusedError(Refusal.LEFT) from e

    def attest(self) -> None:
        """Refuse a process of another user. Raises as :meth:`hear`."""
        if self.ask_uid:
            raise AskTablesError
        if self.shortage is not None:
            raise RefusedError.for_lack(self.shortage) from self.shortage
        if self.uid is None:
            raise RefusedError(Refusal.UNKNOWN_USER, "the kernel does not say which user it belongs to")
        try:
            is_same = same_user(self.uid)
        except ResourceExhaustedError as e:
            raise RefusedError.for_lack(e) from e
        if not is_same:
            raise RefusedError(
                Refusal.OTHER_USER, f"it belongs to another user of this host (uid {self.uid})"
            )

    def refuse(self, refused: RefusedError) -> None:
        """Answer with the reason, if the other end can read it and without waiting; close the connection."""
        with contextlib.suppress(OSError):
            if refused.refusal < Refusal.SILENT and self._is_understood(refused):
                self.sock.send(refused.reply)
            socket.socket.shutdown(self.sock, socket.SHUT_WR)
        self.sock.close()

    def _is_understood(self, refused: RefusedError) -> bool:
        if isinstance(self.sock, ssl.SSLSocket):
            return self._challenge is not None  # the TLS handshake is complete
        return self._tls is None or refused.refusal is Refusal.TLS_NEEDED

    def _shake_hands(self, context: ssl.SSLContext) -> bool:
        """The TLS handshake. Returns whether it is complete."""
        if not isinstance(self.sock, ssl.SSLSocket):
            first = self.sock.recv(1, socket.MSG_PEEK)
            if not first:
                raise RefusedError(Refusal.LEFT)
            if first == MAGIC[:1]:
                raise RefusedError(Refusal.TLS_NEEDED)
            self.sock = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
        if self._challenge is None:
            self.sock.do_handshake()
        return True

    def _step(self, challenge: ServerChallenge) -> bool:
        """One message of the challenge. Returns whether it was complete."""
        data = self.sock.recv(challenge.need - len(self._received))
        if not data and not self._received_all(challenge):
            raise RefusedError(Refusal.LEFT)
        self._received += data
        if not self._spoke and self._received[0] == _TLS_RECORD:
            raise RefusedError(Refusal.NO_TLS_HERE)
        if not self._received_all(challenge):
            return True  # there may be more
        self._spoke = True
        reply = challenge.feed(bytes(self._received))
        self._received.clear()
        if reply:
            # A few hundred bytes into an empty buffer: a client for which that would block is dropped.
            try:
                sent = self.sock.send(reply)
            except (BlockingIOError, ssl.SSLWantWriteError):
                sent = 0
            if sent != len(reply):
                raise RefusedError(Refusal.LEFT)
        return True

    def _received_all(self, challenge: ServerChallenge) -> bool:
        return len(self._received) == challenge.need
