"""Answers other programs of the same user what an engine does, and what became of its requests.

Each side of a connector, and each server of a store, listens at a Unix socket in the user's runtime folder.
So a command finds every engine of the user on this host, also one that serves no peer. Nothing is recorded
for it: it reads what is in memory anyway. The questions, over an authenticated channel::

    {"doctor": "state"}                {"state": {...}}
    {"doctor": "spans", "of": "..."}   {"spans": [...]}, of the request or trace with this id
    {"doctor": "bye"}

At its address an engine answers a doctor that asks for the state (:mod:`kvplug.assembly.examination`). With
``doctor = "off"`` in its config an engine answers none of them. :mod:`kvplug.assembly.watched` sends them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from kvplug.assembly.links import LinkSettings
from kvplug.errors import KvplugError, PeerGoneError, TransportError
from kvplug.metrics.sinks import Reporter, Sink
from kvplug.metrics.spans import SpanLog
from kvplug.metrics.tracing import Tracing
from kvplug.net.trust.addresses import remove_stale
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.listener import Listener
from kvplug.net.wire import to_plain
from kvplug.transport.acceptor import Acceptor

_log = logging.getLogger(__name__)

PURPOSE: Final = "watch"
_TIMEOUT_S: Final = 2.0
_MAX_WATCHERS: Final = 32
"""Programs that watch at once. A forgotten `kvplug top` keeps its place."""
MAX_SPANS: Final = 500
"""The most spans in one answer."""
_numbers = itertools.count()


def runtime_folder(*, make: bool = False) -> Path:
    """Return the folder of this user's sockets: ``kvplug`` in ``XDG_RUNTIME_DIR``, or ``/tmp/kvplug-UID``.

    Raises:
        TransportError: another user owns it, or can write to it.
        OSError: it cannot be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "kvplug") if base else Path(f"/tmp/kvplug-{os.getuid()}")  # noqa: S108 - checked below
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise TransportError(f"{folder} must be a folder that only this user can read and write")
    return folder


class WatchPoint:
    """Answers the programs that watch one side of a connector."""

    def __init__(
        self, state: Callable[[], Mapping[str, Any]], spans: SpanLog, scheduler_of: str = ""
    ) -> None:
        """Start to listen. If that is impossible, log why: an engine does not fail because of it.

        Args:
            state: returns the plain values of the answer; called in another thread.
            scheduler_of: the engine's id, if this is its scheduler's side.
        """
        self._state = state
        self._spans = spans
        self._acceptor: Acceptor[None] | None = None
        try:
            name = f"{os.getpid()}-{next(_numbers)}{ending(scheduler_of)}"
            path = runtime_folder(make=True) / name
            _remove_dead()
            self._acceptor = Acceptor(
                [Listener.open(f"unix:{path}", Credentials(), PURPOSE)],
                self._answer,
                what="a program that watches",
                name="kvplug-watch",
                max_served=_MAX_WATCHERS,
            )
        except (KvplugError, OSError) as e:
            _log.info("`kvplug top` will not find this process: %s", e)

    def _answer(self, connection: Connection) -> None:
        with contextlib.closing(Channel(connection)) as channel, contextlib.suppress(PeerGoneError):
            while True:
                answered: dict[str, Any] = {"unknown": True}
                match channel.recv(timeout=None):
                    case {"doctor": "state"}:
                        answered = {"state": dict(self._state())}
                    case {"doctor": "spans", "of": str(some_id)}:
                        spans = self._spans.of_request(some_id)[-MAX_SPANS:]
                        answered = {"spans": [to_plain(span) for span in spans]}
                    case {"doctor": "bye"}:
                        return
                channel.send(answered, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._acceptor is not None:
            self._acceptor.close()


def observe(settings: LinkSettings, opened: contextlib.ExitStack, sinks: Iterable[Sink] = ()) -> None:
    """Report what this process does until ``opened`` is closed: export its spans, answer programs that watch
    it, and call ``sinks`` and those of the config, each as the config says.

    Raises:
        ConfigError: spans cannot be exported, or a sink is not usable.
    """
    config, labels = settings.config, settings.state.labels
    if config.tracing:
        opened.callback(Tracing(settings.spans, config.tracing, labels).close)
    if config.doctor != "off":
        scheduler_of = config.engine_id if labels["side"] == "scheduler" else ""
        opened.callback(WatchPoint(settings.state.plain, settings.spans, scheduler_of).close)
    reporter = Reporter(settings.stats, tuple(sinks), labels, owned=settings.resolved.sinks())
    opened.callback(reporter.close)


def ending(scheduler_of: str) -> str:
    """Return the end of the name of the socket of an engine's scheduler side; empty for an empty id."""
    return scheduler_of and f"-{hashlib.sha256(scheduler_of.encode()).hexdigest()[:8]}"


def watched_sockets() -> list[Path]:
    """Return the sockets of this user's processes. Some of the processes may be gone.

    Raises:
        TransportError: as :func:`runtime_folder`.
    """
    folder = runtime_folder()
    return sorted(path for path in folder.glob("*-*") if re.fullmatch(r"\d+-\d+(-\w+)?", path.name))


def pid_of(path: Path) -> int:
    """Return the process that listens at this socket."""
    return int(path.name.partition("-")[0])


def _remove_dead() -> None:
    """Remove the sockets of killed processes. A process in another pid namespace may still listen."""
    for path in watched_sockets():
        if not os.path.exists(f"/proc/{pid_of(path)}"):
            remove_stale(str(path))
