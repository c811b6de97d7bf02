"""How requests are cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

STEP_BYTES: Final = 2 << 20
"""Of the copies between two looks at the other tasks. They fit into the cache of one core or two."""

PUT_STEP_BYTES: Final = 2 * STEP_BYTES
"""The same of puts, which look up, make headers and publish in each step."""


def ranges_of(count: int, nbytes: int, step_bytes: int = STEP_BYTES) -> list[range]:
    """Consecutive pages or layers, of about ``step_bytes`` together, if each has ``nbytes``."""
    each = max(1, step_bytes // max(1, nbytes))
    return [range(first, min(first + each, count)) for first in range(0, count, each)]


def runs_of(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges of consecutive ones."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[begin], numbers[at - 1] + 1)
            begin = at
