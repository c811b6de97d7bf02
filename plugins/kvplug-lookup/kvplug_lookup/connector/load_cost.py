"""Whether loading KV is cheaper than computing it: what both cost, as measured by the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import Any, Final

import attrs

from kvplug.engine import SchedulerOutput
from kvplug.transport import DeviceMark
from kvplug_lookup.connector.tracked import Tracked

COMPUTE: Final = "compute"
"""Stands beside the names of sources."""
_HALF_LIFE: Final = 1 << 14
"""Tokens of prefill after which an older measurement counts half."""
_KEPT: Final = 0.8
"""The weight of all older loads when one is added."""
_FEWEST: Final = 2
"""Loads from a source before anything is concluded: the first one opens pipes, and fills caches."""
_MARGIN: Final = 2.0
"""A load may take so many times as long as computing: it leaves the processor to other requests."""
_PEER_MARGIN: Final = 4.0
"""The same for KV that a peer engine has computed for this one."""
_TRY_EVERY: Final = 32
"""Of so many loads that cost too much one is made, since costs change."""


@attrs.define
class _Line:
    """``seconds = fixed + per_token * tokens``, fitted to measurements; older ones count less."""

    num: int = 0
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

    def through_origin(self) -> tuple[float, float]:
        """``fixed`` (0) and ``per_token``: what many tokens took counts more than what few took."""
        return 0.0, self._product / self._tokens_squared

    def fitted(self) -> tuple[float, float]:
        """``fixed`` and ``per_token``, neither of them negative."""
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._tokens_squared / self._weight - tokens**2
        per_token = seconds / tokens
        if spread > (tokens / 8) ** 2:  # else the sizes are too alike to tell the two apart
            slope = (self._product / self._weight - tokens * seconds) / spread
            per_token = min(per_token, max(0.0, slope))
        return seconds - per_token * tokens, per_token


class MeasuredCosts:
    """The worker's side: what steps and loads took."""

    def __init__(self) -> None:
        self._compute = _Line()
        self._loads: dict[str, _Line] = {}
        self._busy_until: dict[str, float] = {}
        self._running: deque[tuple[int, DeviceMark, DeviceMark]] = deque()
        """Steps that the device has perhaps not completed."""
        self._is_new = False

    def note_step(self, num_tokens: int, begun: DeviceMark, ended: DeviceMark) -> None:
        """A step of so many tokens, most of them of prompts, lies between two timed marks."""
        self._running.append((num_tokens, begun, ended))

    def note_load(self, source: str, num_tokens: int, begun: float, ended: float) -> None:
        """A load of so many tokens, by ``time.monotonic``. While the source served an earlier load as well,
        the time is of that one."""
        busy_until = self._busy_until.get(source, 0.0)
        self._busy_until[source] = max(busy_until, ended)
        self._loads.setdefault(source, _Line()).add(
            num_tokens, max(0.0, ended - max(begun, busy_until)), _KEPT
        )
        self._is_new = True

    def forget(self, source: str) -> None:
        """The source has left."""
        self._loads.pop(source, None)
        self._busy_until.pop(source, None)

    def take(self) -> dict[str, tuple[float, float]] | None:
        """Fixed seconds and seconds per token of each source and of :data:`COMPUTE`, as far as they are
        known; ``None`` if nothing is new since the last call."""
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
    """Tokens of a step whose time says what prefill costs: at most half of them are decoded. Else 0."""
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

    def update(self, rank: int, costs: Mapping[str, Any]) -> None:
        """A worker's costs, as :meth:`MeasuredCosts.take` returns them."""
        self._costs[rank] = {str(name): (float(fixed), float(each)) for name, (fixed, each) in costs.items()}

    def should_load(self, num_tokens: Mapping[str, int], peers: Set[str] = frozenset()) -> bool:
        """Whether to load so many tokens from these sources, some of which are peer engines.

        It should where the cost of one is not known, where the load takes up to twice as long as computing,
        and from peers up to four times as long. Of those that take longer one in 32 is made.
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
