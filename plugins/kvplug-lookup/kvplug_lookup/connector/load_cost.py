"""Decides whether to load KV or compute it, by the costs that the workers measure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import Final

import attrs

from kvplug.engine import SchedulerOutput
from kvplug.transport import DeviceMark
from kvplug_lookup.connector.tracked import Tracked

COMPUTE: Final = "compute"
"""The key of prefill's cost, beside the names of sources."""
_HALF_LIFE: Final = 1 << 14
"""Tokens of prefill after which an older measurement counts half."""
_KEPT: Final = 0.8
"""The weight of all older loads when one is added."""
_FEWEST: Final = 2
"""Loads from a source before its cost is used: the first one opens pipes and fills caches."""
_MARGIN: Final = 2.0
"""How many times longer than computing a load may take: it leaves the processor to other requests."""
_PEER_MARGIN: Final = 4.0
"""The same for KV that a peer engine computed for this one."""
_TRY_EVERY: Final = 32
"""One in this many loads that cost too much is made anyway, since costs change."""


@attrs.define
class _Line:
    """``seconds = fixed + per_token * tokens``, fitted to measurements; older ones count less.

    Measurements of similar sizes cannot separate the two. While all recent ones are similar, ``fixed`` keeps
    its value and only ``per_token`` changes. Åström and Wittenmark call this "conditional updating" (Adaptive
    Control, 2nd edition, 1995, chapter 11): it avoids that the weights forget what new data do not replace.
    """

    num: int = 0
    _fixed: float = 0.0
    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _product: float = 0.0

    def add(self, num_tokens: int, seconds: float, kept: float) -> None:
        """``kept``: the weight of the older measurements."""
        self.num += 1
        self._weight = kept * self._weight + 1
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + seconds
        self._tokens_squared = kept * self._tokens_squared + num_tokens**2
        self._product = kept * self._product + num_tokens * seconds
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._tokens_squared / self._weight - mean_tokens**2
        if spread > (mean_tokens / 8) ** 2:
            slope = (self._product / self._weight - mean_tokens * mean_seconds) / spread
            self._fixed = max(0.0, mean_seconds - max(0.0, slope) * mean_tokens)

    def through_origin(self) -> tuple[float, float]:
        """``fixed`` (0) and ``per_token``. Measurements of many tokens weigh more."""
        return 0.0, self._product / self._tokens_squared

    def fitted(self) -> tuple[float, float]:
        """``fixed`` and ``per_token``, both at least 0."""
        fixed = min(self._fixed, self._seconds / self._weight)
        return fixed, (self._seconds - fixed * self._weight) / self._tokens


class MeasuredCosts:
    """The worker's side: measures the time of steps and loads."""

    def __init__(self) -> None:
        self._compute = _Line()
        self._loads: dict[str, _Line] = {}
        self._busy_until: dict[str, float] = {}
        self._running: deque[tuple[int, DeviceMark, DeviceMark]] = deque()
        """Steps that the device may not have completed yet."""
        self._is_new = False

    def note_step(self, num_tokens: int, begun: DeviceMark, ended: DeviceMark) -> None:
        """Note the timed marks around a step of ``num_tokens`` tokens, at least half of them of prompts."""
        self._running.append((num_tokens, begun, ended))

    def note_load(self, source: str, num_tokens: int, begun: float, ended: float) -> None:
        """Note a load of ``num_tokens`` tokens, by ``time.monotonic``. Time that overlaps an earlier load
        from the source counts for the earlier one."""
        busy_until = self._busy_until.get(source, 0.0)
        self._busy_until[source] = max(busy_until, ended)
        self._loads.setdefault(source, _Line()).add(
            num_tokens, max(0.0, ended - max(begun, busy_until)), _KEPT
        )
        self._is_new = True

    def forget(self, source: str) -> None:
        """Drop a source that has left."""
        self._loads.pop(source, None)
        self._busy_until.pop(source, None)

    def take(self) -> dict[str, tuple[float, float]] | None:
        """Return the known fixed seconds and seconds per token of each source and of :data:`COMPUTE`;
        ``None`` if nothing has changed since the last call."""
        while self._running and self._running[0][2].is_passed:
            num_tokens, begun, ended = self._running.popleft()
            kept = 0.5 ** (num_tokens / _HALF_LIFE)
            self._compute.add(num_tokens, ended.seconds_since(begun), kept)
            self._is_new = True
        if not self._is_new:
            return None
        self._is_new = False
        found = {name: line.fitted() for name, line in self._loads.items() if line.num >= _FEWEST}
        return {**found, COMPUTE: self._compute.through_origin()} if self._compute.num else found


def num_tokens_timed(output: SchedulerOutput, tracked: Mapping[str, Tracked]) -> int:
    """Tokens of a step if its time measures prefill: at most half of them are decoded. Otherwise 0."""
    num_tokens = num_of_prompts = 0
    for one in output.scheduled:
        num_tokens += one.num_scheduled_tokens
        if one.request_id in tracked:
            left = tracked[one.request_id].request.num_prompt_tokens - one.num_computed_tokens
            if left > 0:
                num_of_prompts += min(left, one.num_scheduled_tokens)
    return num_tokens if 2 * num_of_prompts >= num_tokens else 0


class LoadCostModel:
    """The scheduler's side: decides by the slowest worker."""

    def __init__(self) -> None:
        self._costs: dict[int, Mapping[str, tuple[float, float]]] = {}
        self._num_refused = 0

    def update(self, rank: int, costs: dict[str, tuple[float, float]]) -> None:
        """Store a worker's costs, as :meth:`MeasuredCosts.take` returns them."""
        self._costs[rank] = costs

    def should_load(self, num_tokens: Mapping[str, int], peers: Set[str] = frozenset()) -> bool:
        """Whether to load these numbers of tokens from these sources.

        True if a source's cost is not known, or if the load takes at most twice as long as computing, or
        four times from peers. One in 32 of the longer loads is made anyway.
        """
        computing, loading = 0.0, 0.0
        for costs in self._costs.values():
            if COMPUTE not in costs or not num_tokens.keys() <= costs.keys():
                return True
            computing = max(computing, costs[COMPUTE][1] * sum(num_tokens.values()))
            weighed = 0.0
            for source, count in num_tokens.items():
                fixed, each = costs[source]
                weighed += (fixed + each * count) / (_PEER_MARGIN if source in peers else _MARGIN)
            loading = max(loading, weighed)
        if loading <= computing:
            return True
        self._num_refused += 1
        return self._num_refused % _TRY_EVERY == 0
