"""Asks other processes what they do now, and what became of a request.

A process of the same user answers at the Unix socket of its :class:`~kvplug.assembly.watching.WatchPoint`.
Any other answers at its address, as it answers a doctor. The questions are the same.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from kvplug.assembly.links import CONTROL
from kvplug.assembly.resolve import ResolvedConfig, make_hello
from kvplug.assembly.state import SideState
from kvplug.assembly.watching import MAX_SPANS, PURPOSE, ending, pid_of, watched_sockets
from kvplug.errors import HandshakeError, KvplugError, PeerGoneError, TransportError
from kvplug.metrics.spans import Span
from kvplug.negotiation.exchange import exchange
from kvplug.negotiation.hello import DOCTOR
from kvplug.net.deadline import Deadline
from kvplug.net.peer_text import peer_texts
from kvplug.net.trust.addresses import remove_stale
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.net.wire import from_plain

_TIMEOUT_S: Final = 3.0
_LOCAL_TIMEOUT_S: Final = 2.0
_RELAY_S: Final = 1.0
"""How long an answer to a doctor waits for the scheduler's side."""
_BYE_S: Final = 0.1
_MAX_CHARACTERS: Final = 400


@attrs.frozen
class _Spans:
    spans: tuple[Span, ...] = ()


class WatchedProcess(abc.ABC):
    """A process that answers. Each question connects to it if that is necessary: at its address, an engine
    hangs up after 16 questions."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        """Its name in messages."""
        self._timeout_s = timeout_s
        self._channel: Channel | None = None

    @abc.abstractmethod
    def _connect(self, deadline: Deadline) -> Channel:
        """Connect to it."""

    def states(self) -> list[SideState]:
        """Return what it does now. At an address an engine adds what its scheduler's side does, if that runs
        as the same user on the same host.

        Raises:
            KvplugError: it is gone, does not answer, or does not trust this process; or its config has
                ``doctor = "off"``.
        """
        answered = self._ask({"doctor": "state"}, "state")
        states = [answered["state"], *filter(None, [answered.get("scheduler")])]
        return [from_plain(each, SideState, f"the state of {self.name}") for each in states]

    def spans_of(self, some_id: str) -> list[Span]:
        """Return what it has kept of the request or trace with this id.

        Raises:
            KvplugError: it is gone, or does not answer.
        """
        answered = self._ask({"doctor": "spans", "of": some_id}, "spans")
        return [*from_plain(answered, _Spans, f"the answer of {self.name}").spans]

    def _ask(self, question: Mapping[str, Any], answer: str) -> Mapping[str, Any]:
        deadline = Deadline.after(self._timeout_s)
        if self._channel is not None:
            with contextlib.suppress(KvplugError):
                return self._answer_of(self._channel, question, answer, deadline.within(self._timeout_s / 2))
            self.close()
        self._channel = self._connect(deadline)
        try:
            return self._answer_of(self._channel, question, answer, deadline)
        except KvplugError:
            self.close()
            raise

    @staticmethod
    def _answer_of(
        channel: Channel, question: Mapping[str, Any], answer: str, deadline: Deadline
    ) -> Mapping[str, Any]:
        channel.send(question, timeout=deadline.remaining())
        answered = peer_texts(channel.recv(timeout=deadline.remaining()), _MAX_CHARACTERS, MAX_SPANS)
        if isinstance(answered, Mapping) and answer in answered:
            return answered
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


class LocalProcess(WatchedProcess):
    """A process of this user on this host."""

    def __init__(self, path: Path, timeout_s: float = _LOCAL_TIMEOUT_S) -> None:
        """``path``: one of :func:`~kvplug.assembly.watching.watched_sockets`. It is removed if no process
        listens there any more."""
        self.pid = pid_of(path)
        self._path = str(path)
        super().__init__(f"process {self.pid}", timeout_s)

    def _connect(self, deadline: Deadline) -> Channel:
        try:
            connection = Connection.dial(f"unix:{self._path}", Credentials(), PURPOSE, deadline.remaining())
        except PeerGoneError:
            with contextlib.suppress(OSError):
                remove_stale(self._path)
            raise
        return Channel(connection)


class PeerProcess(WatchedProcess):
    """A process at an address."""

    def __init__(self, resolved: ResolvedConfig, address: str) -> None:
        """``resolved``: has the secret and the TLS files."""
        self._resolved = resolved
        super().__init__(address, _TIMEOUT_S)

    def _connect(self, deadline: Deadline) -> Channel:
        credentials = self._resolved.credentials
        channel = Channel(Connection.dial(self.name, credentials, CONTROL, deadline.remaining()))
        try:
            # It moves no KV, so neither end loads the code of a transport.
            hello = make_hello(self._resolved, None, False, "cpu", DOCTOR)
            with contextlib.suppress(HandshakeError):  # the peer answers also then
                exchange(channel, hello, deadline.remaining())
        except BaseException:
            channel.close()
            raise
        return channel


def scheduler_state(engine_id: str) -> SideState | None:
    """Return what the scheduler's side of an engine does now; ``None`` if it does not run here as this user,
    or does not answer at once."""
    with contextlib.suppress(KvplugError, OSError):
        for path in watched_sockets():
            if path.name.endswith(ending(engine_id)):
                process = LocalProcess(path, _RELAY_S)
                with contextlib.suppress(KvplugError), contextlib.closing(process):
                    return process.states()[0]
    return None
