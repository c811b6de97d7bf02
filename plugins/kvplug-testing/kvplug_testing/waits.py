"""Waits with a time limit for tests: for calls that may block, and for conditions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvplug import KvplugError
from kvplug.kit import host_load
from kvplug_testing import peers
from kvplug_testing.comparison import brief

__all__ = ["Call", "DeadlineError", "patience_s", "raises", "until"]

patience_s = 20.0
"""How long a test waits for an expected event. It is long because test machines are busy; deadlines of laws
are separate. Tests of transports that are known to hang, such as the kit's own, lower it.
"""


class DeadlineError(AssertionError):
    """An expected event has not come in time."""


class Call:
    """A call in a separate thread. It reports whether the call is blocked, how it ended, and when.

    The thread is a daemon, so that a call that never returns ends its test and not the whole run.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.value: Any = None
        """What the call returned; ``None`` before, and if it raised."""
        self.error: BaseException | None = None
        """What it raised; ``None`` if it did not."""
        self.took_s = 0.0
        """Seconds from its start to its end."""
        self._began = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, args=(call,), name="kvplug_testing call", daemon=True
        )
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.value = call()
        except BaseException as e:
            self.error = e
        self.took_s = time.monotonic() - self._began

    @property
    def ended(self) -> bool:
        """Whether it has returned or raised."""
        return not self._thread.is_alive()

    def end(self, within: float | None = None) -> Call:
        """Wait until it ends. Fails the test with all stacks if that takes longer than ``within``
        (:data:`patience_s`), on a busy host twice as long.
        """
        _wait(lambda within: not self.is_blocked(within), within, "a call is still blocked after")
        return self

    def result(self, within: float | None = None) -> Any:
        """Its return value; raises the error that it raised."""
        self.end(within)
        if self.error is not None:
            raise self.error
        return self.value

    def outcome(self, within: float | None = None) -> Any:
        """Its return value, or the :class:`~kvplug.errors.KvplugError` that it raised.

        Raises any other error.
        """
        self.end(within)
        return self.error if isinstance(self.error, KvplugError) else self.result()

    def raised(self, kind: type[BaseException], within: float | None = None) -> BaseException:
        """The error that it raised, which must be a ``kind``."""
        self.end(within)
        if self.error is None:
            raise AssertionError(f"{kind.__name__} was expected, and the call returned {brief(self.value)}")
        if not isinstance(self.error, kind):
            raise AssertionError(f"{kind.__name__} was expected, not {self.error!r}") from self.error
        return self.error

    def is_blocked(self, for_s: float = 0.2) -> bool:
        """Whether it has not ended ``for_s`` seconds from now."""
        self._thread.join(for_s)
        return self._thread.is_alive()


def raises(kind: type[BaseException], call: Callable[[], Any], within: float | None = None) -> BaseException:
    """The error that ``call`` raises. It must be a ``kind``, and be raised in time."""
    return Call(call).raised(kind, within)


def until(condition: Callable[[], Any], within: float | None = None, what: str = "") -> None:
    """Wait until ``condition()`` is true, for at most ``within`` seconds (:data:`patience_s`), on a busy host
    twice as long.
    """

    def has_come(within: float) -> bool:
        limit = time.monotonic() + within
        while not condition():
            if time.monotonic() > limit:
                return False
            time.sleep(0.002)
        return True

    _wait(has_come, within, f"{what or 'what was waited for'} did not come in")


def _wait(has_come: Callable[[float], bool], within: float | None, missed: str) -> None:
    """Wait ``within`` seconds, and on a busy host once more, since it may be the host that is late."""
    within = patience_s if within is None else within
    if has_come(within) or (host_load() > 1 and has_come(min(within, patience_s))):
        return
    load = f"{host_load():.1f} runnable threads for each processor"
    raise DeadlineError(f"{missed} {within} s; on this host are {load}\n{peers.stacks()}")
