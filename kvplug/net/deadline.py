"""Deadlines: one absolute time, made once from a ``timeout`` and passed down.

Every blocking call of kvplug takes ``timeout``: seconds, or ``None`` for ever. Its default is the finite
default of the called object (the config's ``timeout_s``).
"""

from __future__ import annotations

import enum
import math
import time
from typing import Final

import attrs

from kvplug.errors import ConfigError


class Default(enum.Enum):
    """The type of :data:`DEFAULT_TIMEOUT`, so that ``None`` can mean "for ever"."""

    TIMEOUT = "the endpoint's default"

    def __repr__(self) -> str:
        return "DEFAULT_TIMEOUT"


DEFAULT_TIMEOUT: Final = Default.TIMEOUT
"""The default of every ``timeout`` argument."""

_FOR_EVER_S = 1e9
"""About thirty years, treated as for ever. Locks and sockets refuse ten times as long."""

Timeout = float | None | Default
"""Seconds, ``None`` (for ever), or :data:`DEFAULT_TIMEOUT`."""


@attrs.frozen
class Deadline:
    """A moment of the monotonic clock, or never (``math.inf``).

    >>> deadline = Deadline.after(DEFAULT_TIMEOUT, 30.0)
    >>> 29.0 < deadline.remaining() <= 30.0
    True
    >>> Deadline.after(None).remaining() is None
    True
    >>> Deadline.after(0).expired
    True
    """

    at: float
    """In seconds of ``time.monotonic``; ``math.inf`` is never."""

    @classmethod
    def after(cls, timeout: Timeout, default: float | None = None) -> Deadline:
        """Return the moment ``timeout`` seconds from now. ``default`` replaces DEFAULT_TIMEOUT.

        Raises:
            ConfigError: the timeout is negative or not a number.
        """
        seconds = default if timeout is DEFAULT_TIMEOUT else timeout
        if seconds is None:
            return _NEVER
        try:
            if seconds >= 0:
                return _NEVER if seconds >= _FOR_EVER_S else cls(time.monotonic() + seconds)
        except TypeError:  # not a number
            pass
        from kvplug.config.messages import bad_value

        raise ConfigError(bad_value("timeout", seconds, "a number of seconds, 0 or more, or None for ever"))

    def within(self, seconds: float) -> Deadline:
        """Return this moment, or the moment ``seconds`` from now if that is earlier."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    @property
    def expired(self) -> bool:
        """Whether the moment has come."""
        return time.monotonic() >= self.at

    def remaining(self) -> float | None:
        """Return the seconds left (0.0 once passed), or ``None`` for never. For ``wait(timeout=…)``."""
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())


_NEVER: Final = Deadline(math.inf)
