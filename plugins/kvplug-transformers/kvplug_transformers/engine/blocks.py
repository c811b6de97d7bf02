"""The allocator of the KV cache's blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


def blocks_for(num_tokens: int, block_size: int) -> int:
    """The number of blocks that ``num_tokens`` tokens need."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Hands out block ids and takes them back. A block has one owner at a time; nothing is shared.

    Freed blocks go to the end of the queue, so that a block is reused as late as possible.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` block ids; ``None``, without allocating any, if fewer are free."""
        if count > len(self._free):
            return None
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._is_free[block_id] = False
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            ValueError: one of them is already free; then none is taken back.
        """
        ids = list(block_ids)
        twice = [block_id for block_id in ids if self._is_free[block_id]]
        if twice or len(set(ids)) != len(ids):
            raise ValueError(f"blocks are freed twice: {twice or ids}")
        for block_id in ids:
            self._is_free[block_id] = True
        self._free.extend(ids)
