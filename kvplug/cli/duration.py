"""The type of command options that are durations."""

from __future__ import annotations

from typing import Final

from kvplug.config.messages import shown
from kvplug.config.units import parse_seconds

_LONGEST_S: Final = 1e9
"""About thirty years. Locks and sockets refuse timeouts ten times as long."""


class Duration:
    """The ``type`` of a command option that is a duration: ``30``, ``1.5``, ``500ms`` or ``"5 min"``.

    It refuses negative, infinite and undefined numbers, and also 0 unless ``may_be_zero``.

    >>> Duration()("500ms")
    0.5
    """

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self.__name__ = "duration"  # for click, which shows it in the help
        self._may_be_zero = may_be_zero

    def __call__(self, given: str | float) -> float:
        """Return the duration in seconds.

        Raises:
            click.BadParameter: the value is not an accepted duration.
        """
        try:
            seconds = parse_seconds(str(given))
        except ValueError:
            seconds = -1.0
        if 0 < seconds <= _LONGEST_S or (seconds == 0 and self._may_be_zero):
            return seconds
        import click

        allowed = "a time of at least 0" if self._may_be_zero else "a time above 0"
        raise click.BadParameter(
            f"{shown(given)} was given; allowed is {allowed}, such as 30, 500ms or '5 min'"
        )
