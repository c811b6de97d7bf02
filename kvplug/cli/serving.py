"""Serves until a signal ends the program."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, TypeVar

S = TypeVar("S")

_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


def serve_until_signalled(
    serve: Callable[[], AbstractContextManager[S]], started: Callable[[S], None]
) -> str:
    """Serve until SIGTERM or SIGINT, and return the signal's name. A second signal ends the program at once.

    The signals are blocked in all threads and awaited here, since a handler could interrupt anything.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    with serve() as server:
        started(server)
        _notify_systemd("READY=1")
        ended = signal.sigwait(_ENDING)
        _notify_systemd("STOPPING=1")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    return signal.Signals(ended).name


def _notify_systemd(state: str) -> None:
    """Send the state to systemd if it started this program as a service with ``Type=notify``."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        if name:
            sock.sendto(state.encode(), "\0" + name[1:] if name.startswith("@") else name)
