"""Blocks of requests that ended before the workers had read their pages out of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvplug.engine import BlockIds

_MAX_SHARE: Final = 4
"""Kept blocks of several requests may take at most 1/4 of the cache."""


class KeptBlocks:
    """Tracks which pages the workers have read, and the requests whose blocks are kept until then."""

    def __init__(self, num_workers: int, num_blocks: int) -> None:
        """``num_blocks``: blocks of the whole cache."""
        self._read_until = [-1] * num_workers
        """For each worker, the last step whose pages it has read."""
        self._num_blocks = num_blocks
        self._kept: dict[str, int] = {}
        """Number of kept blocks by request."""
        self._new: list[str] = []

    def __len__(self) -> int:
        return len(self._kept)

    def note_read(self, rank: int, read_until: int) -> None:
        """Note that a worker has read the pages of all steps up to this one."""
        self._read_until[rank] = read_until

    def is_read(self, step: int) -> bool:
        """Whether every worker has read the pages of that step."""
        return step <= min(self._read_until)

    def keep(self, request_id: str, block_ids: BlockIds) -> bool:
        """Keep the blocks of a request that has ended. Return ``False`` if too many blocks are kept.

        The reads of its pages must then be given up.
        """
        is_first = not self._kept
        self._kept[request_id] = sum(map(len, block_ids))
        self._new.append(request_id)
        return is_first or sum(self._kept.values()) <= self._num_blocks // _MAX_SHARE

    def take_new(self) -> tuple[str, ...]:
        """Return the requests that were kept since the last call."""
        new, self._new = self._new, []
        return tuple(new)

    def free(self, request_ids: Iterable[str]) -> None:
        """Note that the engine has freed the blocks of these requests."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)
