"""A process whose ends are lied to: its addresses are bounded, and what goes wrong outside of calls is noted.

Memory that is taken because a peer announced it cannot be had, and the error shows how the transport handles
that.
"""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvplug import KvplugError
from kvplug_testing import peers

ROOM_BYTES: Final = 8 << 30
"""Addresses that the process may take beyond what it has when the lies begin. Stacks, and memory that both
ends map, take most of them."""
MOST_GROWN_BYTES: Final = 512 << 20
"""Memory that it may really use beyond that."""
_ENDING_S: Final = 20.0
"""A transport may keep for seconds what a peer that lives on without its connection might still use."""


class Faults(logging.Handler):
    """Errors in threads and in logs that no transport foresaw."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[str] = []

    def taken(self) -> list[str]:
        """Those since the last call."""
        found, self._found = self._found, []
        return found

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, KvplugError | OSError):
            self._found.append(f"{record.name} logged {type(error).__name__}: {error}"[:500])
        if not is_printable(text := record.getMessage()):
            self._found.append(f"{record.name} logged codes of the peer's: {text[:300]!r}")

    def note(self, args: threading.ExceptHookArgs) -> None:
        self._found.append(f"a thread died: {args.exc_type.__name__}: {args.exc_value}"[:500])


@contextmanager
def faults_noted() -> Iterator[Faults]:
    """While the block runs, in a child process."""
    faults = Faults()
    logging.getLogger().addHandler(faults)
    threading.excepthook = faults.note
    try:
        yield faults
    finally:
        logging.getLogger().removeHandler(faults)


@contextmanager
def bounded(*, is_bounded: bool) -> Iterator[None]:
    """The block, in a child process, takes little memory and leaves nothing behind.

    Raises:
        AssertionError: it did.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if is_bounded:
        resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ROOM_BYTES, hard))
    used = _memory("VmHWM")
    with peers.nothing_left(_ENDING_S):
        yield
    grown = _memory("VmHWM") - used
    assert grown < MOST_GROWN_BYTES, f"{grown} bytes of memory were used, for messages of far fewer"


def is_printable(text: str) -> bool:
    """Whether a text has no codes for a terminal."""
    return all(line.isprintable() for line in text.splitlines())


def _memory(field: str) -> int:
    """Bytes that the kernel counts for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0
