"""Dispatch of tokens to their experts, and combination of the results, where each rank holds some experts.

The algorithms need no library of their own: every rank receives every token and processes those that are
routed to its experts, and the results of all ranks are summed.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvplug.transport.communicator.calls import empty, plain

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug.net.deadline import Deadline
    from kvplug.transport.communicator.checked_calls import CheckedCalls
    from kvplug.transport.communicator.tokens import TokenSplit


class All2AllManager(abc.ABC):
    """The implementation of ``dispatch`` and ``combine`` of a device communicator.

    Its arguments have been checked, and compared with those of the other ranks. It uses the transport's
    primitives. Both methods raise TimeoutError or PeerGoneError that names the missing ranks.
    """

    def __init__(self, communicator: CheckedCalls) -> None:
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
