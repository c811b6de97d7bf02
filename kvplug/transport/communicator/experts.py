"""Dispatch of tokens to their experts, and combination of the results, where each rank holds some experts.

The algorithms need no library of their own: every rank receives every token and processes those that are
routed to its experts, and the results of all ranks are summed.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from kvplug.errors import ConfigError, TensorMismatchError
from kvplug.transport.communicator.calls import empty, plain

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug.net.deadline import Deadline
    from kvplug.transport.communicator.rank import GroupRank


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


class All2AllManager(abc.ABC):
    """The implementation of ``dispatch`` and ``combine`` of a device communicator.

    Its arguments have been checked, and compared with those of the other ranks. It uses the transport's
    primitives. Both methods raise TimeoutError or PeerGoneError that names the missing ranks.
    """

    def __init__(self, communicator: GroupRank) -> None:
        self.communicator = communicator
        """Its communicator, whose collectives it calls."""

    @abc.abstractmethod
    def dispatch(self, tensors: Sequence[Tensor], split: TokenSplit, deadline: Deadline) -> list[Tensor]:
        """Each of ``tensors`` with the rows of all ranks, as ``split`` says; here are those of this rank."""

    @abc.abstractmethod
    def combine(self, hidden_states: Tensor, split: TokenSplit, deadline: Deadline) -> Tensor:
        """This rank's rows of the sum of all ranks' ``hidden_states``, which have the rows of all ranks."""

    def _sum_of_all(self, hidden_states: Tensor, split: TokenSplit, deadline: Deadline) -> Tensor:
        total = plain(hidden_states).clone()
        self.communicator._all_reduce(total, deadline)
        return total[split.rows(self.communicator.rank_in_group)].clone()


class NaiveAll2AllManager(All2AllManager):
    """Each rank broadcasts its tokens; all results are summed at all ranks."""

    def dispatch(self, tensors: Sequence[Tensor], split: TokenSplit, deadline: Deadline) -> list[Tensor]:
        found = []
        for tensor in tensors:
            whole = empty(tensor, (split.total, *tensor.shape[1:]))
            for rank, size in enumerate(split.sizes):
                if size:
                    part = whole[split.rows(rank)]
                    if rank == self.communicator.rank_in_group:
                        part.copy_(tensor.detach())
                    self.communicator._broadcast(part, rank, deadline)
            found.append(whole)
        return found

    def combine(self, hidden_states: Tensor, split: TokenSplit, deadline: Deadline) -> Tensor:
        return self._sum_of_all(hidden_states, split, deadline)


class AllGatherReduceScatterManager(All2AllManager):
    """Tokens are gathered, and results are reduced and scattered: each rank receives the rows of its own
    tokens.

    Ranks that share their tokens need the same rows, so there the sum is computed at all ranks.
    """

    def dispatch(self, tensors: Sequence[Tensor], split: TokenSplit, deadline: Deadline) -> list[Tensor]:
        here = split.sizes[self.communicator.rank_in_group]
        return [self.communicator._gathered(each[:here], 0, split.sizes, deadline) for each in tensors]

    def combine(self, hidden_states: Tensor, split: TokenSplit, deadline: Deadline) -> Tensor:
        if split.shared:
            return self._sum_of_all(hidden_states, split, deadline)
        return self.communicator._scattered(hidden_states, 0, split.sizes, deadline)


DEFAULT_BACKEND: Final = "allgather_reducescatter"
MANAGERS: Final[Mapping[str, type[All2AllManager]]] = {
    "naive": NaiveAll2AllManager,
    DEFAULT_BACKEND: AllGatherReduceScatterManager,
}
"""The managers by the value of ``all2all_backend``."""
