"""Which blocks and slots hold which tokens: arithmetic, without tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvplug.errors import LayoutError


def spans(block_ids: Sequence[int], block_size: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Where tokens ``start`` to ``end`` (exclusive) of a sequence lie: (block id, first token in it, count).

    ``block_ids`` is the sequence's block table: its i-th block holds tokens i * block_size and on.

    Raises:
        LayoutError: the range is empty the wrong way round, or the table too short for it.
    """
    check_range(len(block_ids), block_size, start, end)
    at = start
    while at < end:
        index, offset = divmod(at, block_size)
        count = min(block_size - offset, end - at)
        yield block_ids[index], offset, count
        at += count


def slots(block_ids: Sequence[int], block_size: int, start: int, end: int) -> list[int]:
    """The slot (``block_id * block_size + offset``) of each token of the range, in token order.

    Raises:
        LayoutError: as for :func:`spans`.
    """
    return [
        slot
        for block_id, offset, count in spans(block_ids, block_size, start, end)
        for slot in range(block_id * block_size + offset, block_id * block_size + offset + count)
    ]


def blocks_of(block_ids: Sequence[int], block_size: int, start: int, end: int) -> tuple[int, ...]:
    """The blocks that hold any token of the range, in token order.

    Raises:
        LayoutError: as for :func:`spans`.
    """
    check_range(len(block_ids), block_size, start, end)
    return tuple(block_ids[start // block_size : -(-end // block_size)]) if start < end else ()


def check_range(num_blocks: int, block_size: int, start: int, end: int) -> None:
    """Return if a table of ``num_blocks`` holds tokens ``start`` to ``end``.

    Raises:
        LayoutError: it does not; says how many tokens it holds.
    """
    if block_size < 1:
        raise LayoutError(f"a block holds one token or more, not {block_size}")
    if not 0 <= start <= end:
        raise LayoutError(f"tokens {start} to {end} are no range")
    if end > num_blocks * block_size:
        raise LayoutError(
            f"tokens {start} to {end} do not fit {num_blocks} blocks of {block_size}, which hold"
            f" {num_blocks * block_size}"
        )
