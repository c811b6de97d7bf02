"""The allocator of the KV cache's blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


def blocks_for(num_tokens: int, block_size: int) -> int:
    """The number of blocks that ``num_tokens`` tokens need."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Hands out block ids and takes them back. A block has one owner at a time; nothing is shared.

    Freed blocks go to the end of the queue, so that a block is reused as late as possible.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` block ids; ``None``, without allocating any, if fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.popitem(last=False)[0] for _ in range(count)]

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            ValueError: one of them is already free; then none is taken back.
        """
        ids = list(block_ids)
        if self._free.keys() & ids or len(set(ids)) != len(ids):
            raise ValueError(f"blocks are freed twice: {ids}")
        self._free.update(dict.fromkeys(ids))
