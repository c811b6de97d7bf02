"""Blocks that may hold wrong KV after a load by another connector of the engine (vLLM's MultiConnector)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvplug.engine import BlockIds
from kvplug_lookup.connector.groups import Groups
from kvplug_lookup.connector.tracked import Tracked


class DoubtedBlocks:
    """Tracks the blocks that a step must not save from.

    If another connector loads tokens within the step that needs them, only that step's report shows whether
    the load failed. So the blocks that such a step writes are doubted in it. The workers doubt them in each
    step that was planned before the report arrived. Blocks in a report are wrong until they are written
    again, and so are blocks that are computed from them meanwhile.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._unsure: frozenset[int] = frozenset()
        """Doubted blocks of the step that is being planned."""
        self._wrong: frozenset[int] = frozenset()

    def report(self, invalid_block_ids: Iterable[int]) -> None:
        """Note that loads into these blocks have failed."""
        self._wrong = self._wrong.union(invalid_block_ids)

    def schedule(self, tracked: Tracked, start: int, end: int, block_ids: Callable[[str], BlockIds]) -> None:
        """Note that the planned step computes these tokens. Call it before :meth:`Tracked.compute`."""
        first, sure = start, start
        if not tracked.num_computed:  # tokens in between were loaded since the engine last asked
            first, sure = min(start, tracked.num_computed_at_match), tracked.num_sure or 0
        if sure >= start and not self._wrong:
            return
        table = block_ids(tracked.request.request_id)
        written = self._groups.written(table, first, end)
        if sure < start:
            self._unsure |= written
        if self._wrong.isdisjoint(self._groups.written(table, 0, first)):
            self._wrong -= written
        else:
            self._wrong |= written

    def take(self) -> frozenset[int]:
        """Return the blocks that the planned step must not save from."""
        unsure, self._unsure = self._unsure, frozenset()
        return unsure | self._wrong
