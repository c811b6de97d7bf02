"""How requests are cut into steps, and what a put that ends has come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvplug.transport import JobTask, MissReason, PutReason

STEP_BYTES: Final = 2 << 20
"""Of the copies between two looks at the other tasks. They fit into the cache of one core or two."""

PUT_STEP_BYTES: Final = 2 * STEP_BYTES
"""The same of puts, which look up, make headers and publish in each step."""


def put_results(
    results: Sequence[Any], reason: MissReason | None, forgotten: Sequence[bool]
) -> list[PutReason | None]:
    """The results of a put that ends for that reason. ``forgotten``: pages that were removed meanwhile, also
    if they were there before."""
    left = None if reason is None else PutReason.of(reason)
    ended = [left if each is JobTask.UNKNOWN else each for each in results]
    return [
        PutReason.CANCELLED if gone and each is None else each
        for each, gone in zip(ended, forgotten, strict=True)
    ]


def page_ranges(count: int, page_bytes: int, step_bytes: int = STEP_BYTES) -> list[range]:
    """Consecutive pages, of about ``step_bytes`` together."""
    each = max(1, step_bytes // max(1, page_bytes))
    return [range(first, min(first + each, count)) for first in range(0, count, each)]


def layer_ranges(num_layers: int, layer_bytes: int) -> list[range]:
    """Consecutive layers, of about :data:`STEP_BYTES` together, if a layer of all pages has so many bytes."""
    each = max(1, STEP_BYTES // max(1, layer_bytes))
    return [range(first, min(first + each, num_layers)) for first in range(0, num_layers, each)]


def runs_of(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges of consecutive ones."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[begin], numbers[at - 1] + 1)
            begin = at
