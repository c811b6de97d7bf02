"""The end that is lied to: how each of its calls ended, what was logged, and how much memory it took.

It runs in a process of its own, whose address space is bounded: memory that is taken because a peer announced
it cannot be had, and the error shows how the transport handles that.
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from kvplug import KvplugError
from kvplug_testing.peers import stacks
from kvplug_testing.waits import Call

CALL_S: Final = 0.1
"""The timeout of a call of the victim's."""
SLACK_S: Final = 10.0
"""How much later than its timeout a call may end: machines are busy."""
_ENDING_S: Final = 0.5
"""How long threads may take to end."""
ROOM_BYTES: Final = 4 << 30
"""Addresses that the process may take beyond what it has when the lies begin. Stacks take most of them."""
MOST_GROWN_BYTES: Final = 512 << 20
"""Memory that it may really use beyond that."""


@attrs.frozen
class Ended:
    """How a call ended, in plain values, so that a process can report it."""

    call: str
    took_s: float
    timeout_s: float
    value: Any = None
    error: str = ""
    """The error's class; empty: it returned ``value``."""
    text: str = ""
    is_ours: bool = True
    """The error is kvplug's."""
    is_receipt: bool = False
    """Its value is a message."""
    wrong: str = ""
    """In which way the value is not what was asked for."""

    def breach(self) -> str:
        """What is wrong with it; empty: nothing."""
        if self.wrong:
            return f"{self.call} returned what was not asked for: {self.wrong}"
        if not self.is_ours:
            return f"{self.call} raised {self.error}, which is no error of kvplug's: {self.text}"
        if self.took_s > self.timeout_s + SLACK_S:
            return f"{self.call} with a timeout of {self.timeout_s} s has not ended in time: {self.text}"
        if not _is_printable(self.text):
            return f"{self.call} raised an error with codes of the peer's in its text: {self.text!r}"
        return ""


def ended(call: str, timeout_s: float, run: Callable[[], Any]) -> Ended:
    """Run a call, which must end."""
    running = Call(run)
    try:
        running.end(timeout_s + SLACK_S)
    except AssertionError as e:
        return Ended(call, float("inf"), timeout_s, text=str(e)[:20_000])
    error = running.error
    if error is None:
        return Ended(call, running.took_s, timeout_s, value=running.value)
    ours = isinstance(error, KvplugError)
    return Ended(call, running.took_s, timeout_s, None, type(error).__name__, str(error)[:2000], ours)


def _is_printable(text: str) -> bool:
    return all(line.isprintable() for line in text.splitlines())


class _Faults(logging.Handler):
    """Notes errors in threads and in logs that no transport foresaw."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, KvplugError | OSError):
            self.found.append(f"{record.name} logged {type(error).__name__}: {error}"[:500])
        if not _is_printable(text := record.getMessage()):
            self.found.append(f"{record.name} logged codes of the peer's: {text[:300]!r}")

    def note(self, args: threading.ExceptHookArgs) -> None:
        self.found.append(f"a thread died: {args.exc_type.__name__}: {args.exc_value}"[:500])


class Victim:
    """The process: call :meth:`hold_honest` after an honest conversation, :meth:`faults` after each lie, and
    :meth:`grown` at the end."""

    def __init__(self, faults: _Faults) -> None:
        self._faults = faults
        self._used = _memory("VmHWM")
        self._threads = threading.active_count()

    def hold_honest(self) -> None:
        """What was said until now is true: the threads that are left of it are not too many."""
        time.sleep(_ENDING_S)
        self._threads = threading.active_count()

    def faults(self) -> list[str]:
        """Errors that were not foreseen, since the last call."""
        found, self._faults.found = self._faults.found, []
        return found

    def grown(self) -> str:
        """What it has taken too much of; empty: nothing."""
        # A transport may keep for seconds what a peer that lives on without its connection might still use.
        limit = time.monotonic() + 2 * SLACK_S
        while (more := threading.active_count() - self._threads) > 0 and time.monotonic() < limit:
            time.sleep(0.02)
        found = []
        if more > 0:
            names = ", ".join(sorted(thread.name for thread in threading.enumerate()))
            found.append(f"{more} threads are left, among {names}:\n{stacks()}")
        if (used := _memory("VmHWM") - self._used) > MOST_GROWN_BYTES:
            found.append(f"{used} bytes of memory were used, for messages of far fewer")
        return "; ".join(found)


@contextmanager
def victim(*, bounded: bool = True) -> Iterator[Victim]:
    """In a child process: bound its memory, and note what goes wrong outside of calls."""
    faults = _Faults()
    logger = logging.getLogger()
    logger.addHandler(faults)
    threading.excepthook = faults.note
    if bounded:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ROOM_BYTES, hard))
    try:
        yield Victim(faults)
    finally:
        logger.removeHandler(faults)


def _memory(field: str) -> int:
    """Bytes that the kernel counts for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0
