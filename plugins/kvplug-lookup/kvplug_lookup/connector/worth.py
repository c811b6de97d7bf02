"""Whether loading is faster than computing: both rates, as measured by the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NEWEST = 0.3
"""Weight of the newest sample in a running mean."""
_TRY_EVERY = 32
"""Of so many loads that are not worth it one is made, since rates change."""
_MARGIN = 1.1
"""A load may take this much longer than computing: it leaves the processor to other requests."""


class Rates:
    """The worker's side: running means of what loads and steps took."""

    def __init__(self) -> None:
        self._seconds_per_token: dict[str, float] = {}
        self._is_new = False

    def note(self, what: str, num_tokens: int, seconds: float) -> None:
        """A load from the source ``what``, or a step ("compute"), of so many tokens took so long."""
        if num_tokens <= 0 or seconds <= 0:
            return
        newest = seconds / num_tokens
        before = self._seconds_per_token.get(what, newest)
        self._seconds_per_token[what] = before + _NEWEST * (newest - before)
        self._is_new = True

    def forget(self, source: str) -> None:
        """The source has left."""
        self._seconds_per_token.pop(source, None)

    def take(self) -> dict[str, float] | None:
        """The rates, if any is new since the last call: seconds per token by source, and of "compute"."""
        if not self._is_new:
            return None
        self._is_new = False
        return dict(self._seconds_per_token)


class Worth:
    """The scheduler's side: decides by the slowest worker's rates."""

    def __init__(self) -> None:
        self._rates: dict[int, Mapping[str, float]] = {}
        self._num_refused = 0

    def hear(self, rank: int, rates: Mapping[str, Any]) -> None:
        """A worker's rates."""
        self._rates[rank] = {str(what): float(rate) for what, rate in rates.items()}

    def is_worth_it(self, num_tokens: Mapping[str, int]) -> bool:
        """Whether to load so many tokens from these sources. Where a rate is not known, it is."""
        computing, loading = 0.0, 0.0
        for rates in self._rates.values():
            if "compute" not in rates:
                return True
            computing = max(computing, rates["compute"] * sum(num_tokens.values()))
            taken = 0.0
            for source, count in num_tokens.items():
                if source not in rates:
                    return True
                taken += rates[source] * count
            loading = max(loading, taken)
        if loading <= _MARGIN * computing or not self._rates:
            return True
        self._num_refused += 1
        return self._num_refused % _TRY_EVERY == 0
