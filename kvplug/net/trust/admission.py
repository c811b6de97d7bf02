"""How many unproven connections a listener serves at once, and how many new ones of each origin.

An *origin* is what the kernel shows of a connection before it has sent a byte: a user of this host, or the
address of another host. A flood from one origin leaves places and time for the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

import attrs

T = TypeVar("T", bound=Hashable)

BURST = 64
PER_SECOND = 16.0
"""Connections of one origin that may fail to prove themselves: so many at once, and so many a second."""
_MOST_ORIGINS = 1024


@attrs.define
class _Failures:
    left: float
    at: float


class Admission(Generic[T]):
    """The unproven connections of a listener by origin, oldest first. For one thread; it reads no clock.

    >>> admission = Admission[str](max_unproven=4)
    >>> for name in "abc":
    ...     admission.add(name, "a flood")
    >>> admission.to_drop("a flood"), admission.to_drop("another origin")
    ('a', None)
    """

    def __init__(self, max_unproven: int) -> None:
        self._most = max_unproven
        self._most_of_one = max(1, max_unproven * 3 // 4)
        self._origins: dict[T, Hashable] = {}
        self._count: Counter[Hashable] = Counter()
        self._failures: dict[Hashable, _Failures] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def __contains__(self, connection: object) -> bool:
        return connection in self._origins

    @property
    def oldest(self) -> T | None:
        return next(iter(self._origins), None)

    def all(self) -> list[T]:
        return list(self._origins)

    def to_drop(self, origin: Hashable) -> T | None:
        """The connection that must go before another one of ``origin`` is added; ``None``: there is a place.

        The oldest of the same origin if that has three quarters of the places, else the oldest of the origin
        that has most.
        """
        if self._count[origin] >= self._most_of_one:
            crowding = origin
        elif len(self._origins) >= self._most:
            crowding = self._count.most_common(1)[0][0]
        else:
            return None
        return next(each for each, its in self._origins.items() if its == crowding)

    def add(self, connection: T, origin: Hashable) -> None:
        self._origins[connection] = origin
        self._count[origin] += 1

    def remove(self, connection: T) -> Hashable:
        """Returns its origin."""
        origin = self._origins.pop(connection)
        self._count[origin] -= 1
        if not self._count[origin]:
            del self._count[origin]
        return origin

    # -- how often an origin may fail --------------------------------------------------------------------

    def may_come(self, origin: Hashable, now: float) -> bool:
        """Whether a new connection of ``origin`` is worth a look: not after too many that failed."""
        failures = self._failures.get(origin)
        return failures is None or self._refilled(failures, now) >= 1.0

    def failed(self, origin: Hashable, now: float) -> None:
        """A connection of ``origin`` did not prove itself."""
        failures = self._failures.pop(origin, None) or _Failures(BURST, now)
        failures.left, failures.at = max(0.0, self._refilled(failures, now) - 1.0), now
        self._failures[origin] = failures  # the last one to be forgotten
        if len(self._failures) > _MOST_ORIGINS:
            del self._failures[next(iter(self._failures))]

    def _refilled(self, failures: _Failures, now: float) -> float:
        return min(float(BURST), failures.left + (now - failures.at) * PER_SECOND)
