"""Asks the engine, or the server of a store, at an address what it does now, as a doctor does."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

from kvplug.assembly.peers import CONTROL
from kvplug.assembly.resolve import ResolvedConfig, make_hello
from kvplug.errors import HandshakeError, KvplugError, TransportError
from kvplug.negotiation.exchange import exchange
from kvplug.negotiation.hello import DOCTOR
from kvplug.net.deadline import Deadline
from kvplug.net.peer_text import peer_texts
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection

_TIMEOUT_S: Final = 3.0
_BYE_S: Final = 0.1
_MAX_CHARACTERS: Final = 400


class WatchedPeer:
    """A process at an address. It connects when it is asked, and again when the peer has ended the
    conversation, as it does after 16 questions."""

    def __init__(self, resolved: ResolvedConfig, address: str) -> None:
        """``resolved``: has the secret and the TLS files."""
        self._resolved = resolved
        self._address = address
        self._channel: Channel | None = None

    def states(self) -> list[Mapping[str, Any]]:
        """Return what the process does now, and what the scheduler's side of its engine does, if that runs as
        the same user on the same host.

        Raises:
            KvplugError: it is gone, does not answer, or does not trust this process; or its config has
                ``doctor = "off"``.
        """
        deadline = Deadline.after(_TIMEOUT_S)
        if self._channel is not None:
            with contextlib.suppress(KvplugError):
                return self._ask(self._channel, deadline.within(_TIMEOUT_S / 2))
            self.close()
        self._channel = self._connected(deadline)
        try:
            return self._ask(self._channel, deadline)
        except KvplugError:
            self.close()
            raise

    def _connected(self, deadline: Deadline) -> Channel:
        credentials = self._resolved.credentials
        channel = Channel(Connection.dial(self._address, credentials, CONTROL, deadline.remaining()))
        try:
            # It moves no KV, so neither end loads the code of a transport.
            hello = make_hello(self._resolved, None, False, "cpu", DOCTOR)
            with contextlib.suppress(HandshakeError):  # the peer answers also then
                exchange(channel, hello, deadline.remaining())
        except BaseException:
            channel.close()
            raise
        return channel

    @staticmethod
    def _ask(channel: Channel, deadline: Deadline) -> list[Mapping[str, Any]]:
        channel.send({"doctor": "state"}, timeout=deadline.remaining())
        answered = peer_texts(channel.recv(timeout=deadline.remaining()), _MAX_CHARACTERS)
        if isinstance(answered, Mapping) and isinstance(answered.get("state"), Mapping):
            scheduler = answered.get("scheduler")
            return [answered["state"], *([scheduler] if scheduler and isinstance(scheduler, Mapping) else ())]
        raise TransportError(
            f"{channel.peer} does not answer: its config has doctor = 'off', it serves too many doctors, or"
            " its kvplug is older"
        )

    def close(self) -> None:
        """Hang up."""
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(KvplugError):
                channel.send({"doctor": "bye"}, timeout=_BYE_S)
            channel.close()
