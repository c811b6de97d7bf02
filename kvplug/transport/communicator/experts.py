"""How the tokens are split among the ranks when each rank holds some experts. All functions are pure."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvplug.errors import ConfigError, TensorMismatchError


@attrs.frozen
class TokenSplit:
    """Which rows belong to which rank in a tensor with the tokens of all ranks, in the order of ranks."""

    sizes: tuple[int, ...]
    """How many tokens each rank contributed; 0 if another rank contributed the same tokens."""
    owners: tuple[int, ...]
    """For each rank, the rank that contributed its tokens: itself, unless ranks share tokens."""

    @classmethod
    def of(cls, counts: Sequence[int], width: int) -> TokenSplit:
        """Return the split if each rank r has ``counts[r]`` tokens, and each group of ``width`` consecutive
        ranks shares its tokens.

        Raises:
            TensorMismatchError: ranks that share their tokens have different numbers of tokens.
        """
        owners = tuple(rank - rank % width for rank in range(len(counts)))
        for rank, owner in enumerate(owners):
            if counts[rank] != counts[owner]:
                raise TensorMismatchError(
                    f"rank {owner} has {counts[owner]} tokens and rank {rank} has {counts[rank]}, but without"
                    f" is_sequence_parallel each group of {width} ranks must have the same tokens"
                )
        return cls(tuple(counts[r] if owners[r] == r else 0 for r in range(len(counts))), owners)

    @property
    def total(self) -> int:
        """The number of tokens of all ranks, which is the number of rows of the tensor."""
        return sum(self.sizes)

    @property
    def shared(self) -> bool:
        """Whether some ranks have the same tokens."""
        return self.owners != tuple(range(len(self.owners)))

    def rows(self, rank: int) -> slice:
        """Return the rows of ``rank``'s tokens."""
        owner = self.owners[rank]
        start = sum(self.sizes[:owner])
        return slice(start, start + self.sizes[owner])


def width_of(world_size: int, data_parallel_size: int) -> int:
    """Return how many ranks share their tokens: the ranks of one data-parallel rank.

    Raises:
        ConfigError: the ranks cannot be divided evenly.
    """
    if world_size > 1 and world_size % data_parallel_size:
        raise ConfigError(
            f"a group of {world_size} ranks cannot be divided evenly by"
            f" data_parallel_size={data_parallel_size}"
        )
    return max(1, world_size // data_parallel_size)
