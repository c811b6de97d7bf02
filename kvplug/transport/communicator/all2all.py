"""How tokens come to their experts and back, where every rank holds some of the experts.

The forms are those of engines that need no library of their own for it: every rank gets every token, works on
those that its experts are wanted for, and what the ranks have made is added up.
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
    """What ``dispatch`` and ``combine`` of a device communicator go through.

    It is called with what was checked, and compared with the other ranks', and uses what the transport wrote.
    Both methods raise TimeoutError or PeerGoneError that names the ranks that are missing.
    """

    def __init__(self, communicator: CheckedCalls) -> None:
        self.communicator = communicator

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
    """Each rank broadcasts its tokens; all results are added up at all ranks."""

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
    """Tokens are gathered, and results scattered as they are added up: each rank gets its own and no others.

    Where ranks share their tokens each of them needs the same rows, and the sum is made at all ranks.
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
"""By the words of ``all2all_backend``."""
