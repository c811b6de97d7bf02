"""Which tokens the ranks have when each of them holds some experts: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from kvplug.errors import ConfigError, TensorMismatchError

NAIVE: Final = "naive"
"""Each rank broadcasts its tokens, and all results are summed at all ranks."""
DEFAULT_BACKEND: Final = "allgather_reducescatter"
"""Tokens are gathered. Results are reduced and scattered: each rank receives the rows of its own tokens."""


@attrs.frozen
class TokenSplit:
    """The rows of a tensor that has the tokens of all ranks, in the order of ranks."""

    sizes: tuple[int, ...]
    """How many tokens each rank contributed; 0 where another rank contributed the same ones."""
    owners: tuple[int, ...]
    """Which rank contributed each rank's tokens: itself, unless ranks share them."""

    @classmethod
    def of(cls, counts: Sequence[int], width: int) -> TokenSplit:
        """``counts[r]`` are rank r's tokens. Each ``width`` ranks, one after the other, share theirs.

        Raises:
            TensorMismatchError: ranks that share their tokens have not as many.
        """
        owners = tuple(rank - rank % width for rank in range(len(counts)))
        for rank, owner in enumerate(owners):
            if counts[rank] != counts[owner]:
                raise TensorMismatchError(
                    f"rank {owner} has {counts[owner]} tokens and rank {rank} has {counts[rank]}, and without"
                    f" is_sequence_parallel each {width} ranks have the same ones"
                )
        return cls(tuple(counts[r] if owners[r] == r else 0 for r in range(len(counts))), owners)

    @property
    def total(self) -> int:
        """Tokens of all ranks: the rows of the tensor."""
        return sum(self.sizes)

    @property
    def shared(self) -> bool:
        """Whether some ranks have the same tokens."""
        return self.owners != tuple(range(len(self.owners)))

    def rows(self, rank: int) -> slice:
        """Of ``rank``'s tokens."""
        owner = self.owners[rank]
        start = sum(self.sizes[:owner])
        return slice(start, start + self.sizes[owner])


def width_of(world_size: int, data_parallel_size: int) -> int:
    """How many ranks share their tokens: those of one data-parallel rank.

    Raises:
        ConfigError: the ranks cannot be shared out evenly.
    """
    if world_size > 1 and world_size % data_parallel_size:
        raise ConfigError(
            f"data_parallel_size={data_parallel_size}, and a group of {world_size} ranks cannot be shared out"
            " evenly among so many"
        )
    return max(1, world_size // data_parallel_size)
