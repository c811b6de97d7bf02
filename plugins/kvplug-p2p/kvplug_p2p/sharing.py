"""Arithmetic for two engines that divide heads and tokens differently among workers and blocks."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvplug import HandshakeError
from kvplug.engine import NO_BLOCK, LayoutError


@attrs.frozen
class HeadRange:
    """Consecutive heads that a worker pulls from one worker of the producer."""

    rank: int
    """Tensor-parallel rank of the producer's worker."""
    theirs: int
    """Index of the first head at the producer's worker; :attr:`ours`: at this worker."""
    ours: int
    count: int


def heads_of(rank: int, size: int, num_heads: int) -> range:
    """The heads that worker ``rank`` of ``size`` has. With more workers than heads, several have the same."""
    if size >= num_heads:
        first = rank * num_heads // size
        return range(first, first + 1)
    each = num_heads // size
    return range(rank * each, (rank + 1) * each)


def head_ranges(rank: int, size: int, their_size: int, num_heads: int) -> list[HeadRange]:
    """Find which of ``their_size`` workers worker ``rank`` of ``size`` pulls its heads from, in their order.

    ``num_heads``: of the whole model; 0 for latent attention, which every worker has whole. If several
    workers have the same head, different ranks pull it from different workers.

    Raises:
        HandshakeError: the sizes are not multiples of each other.
    """
    if max(size, their_size) % min(size, their_size):
        raise HandshakeError(
            f"tensor_parallel_size: ours {size}, theirs {their_size}; make one a multiple of the other"
        )
    if not num_heads:
        return [HeadRange(rank % their_size, 0, 0, 1)]
    for whose, each in (("ours", size), ("theirs", their_size)):
        if max(each, num_heads) % min(each, num_heads):
            raise HandshakeError(
                f"tensor_parallel_size: {whose} {each}, and the model has {num_heads} KV heads; make one a"
                " multiple of the other"
            )
    mine = heads_of(rank, size, num_heads)
    found: list[HeadRange] = []
    at = mine.start
    while at < mine.stop:
        holders = [each for each in range(their_size) if at in heads_of(each, their_size, num_heads)]
        holder = holders[rank % len(holders)]
        theirs = heads_of(holder, their_size, num_heads)
        count = min(mine.stop, theirs.stop) - at
        found.append(HeadRange(holder, at - theirs.start, at - mine.start, count))
        at += count
    return found


def unit_of(our_block_size: int, their_block_size: int) -> int:
    """The number of tokens in a unit of transfer: the smaller of the two block sizes.

    Raises:
        HandshakeError: neither divides the other.
    """
    small, large = sorted((our_block_size, their_block_size))
    if large % small:
        raise HandshakeError(
            f"block_size: ours {our_block_size}, theirs {their_block_size}; make one a multiple of the other"
        )
    return small


def units(block_ids: Sequence[int], block_size: int, unit: int, start: int, end: int) -> list[int]:
    """The units that hold tokens ``start`` to ``end``, in token order: ``block * units in a block + number``.

    A unit is ``NO_BLOCK`` if its block is missing.

    Raises:
        LayoutError: the table is too short.
    """
    if end > len(block_ids) * block_size:
        raise LayoutError(f"tokens {start} to {end} do not fit {len(block_ids)} blocks of {block_size}")
    each = block_size // unit
    found = []
    for at in range(start // unit, -(-end // unit)):
        block = block_ids[at // each]
        found.append(NO_BLOCK if block == NO_BLOCK else block * each + at % each)
    return found
