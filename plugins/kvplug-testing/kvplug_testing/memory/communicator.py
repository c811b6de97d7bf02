"""The communicator "memory": ranks are threads of one process, which exchange copies of tensors."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.transport import CommunicatorContext, Deadline, DeviceCommunicator

if TYPE_CHECKING:
    from torch import Tensor

_exchanges: Final[dict[str, Exchange]] = {}
_numbers = itertools.count(1)


class Exchange:
    """Exchanges values between ranks. Each pair, and the whole group, has its own numbered rounds."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.counts: dict[tuple[int, tuple[int, ...]], int] = {}
        self.rounds: dict[tuple[tuple[int, ...], int], dict[int, Any]] = {}
        self.collected: dict[tuple[tuple[int, ...], int], int] = {}
        self.gone: set[int] = set()
        self.broken: KvplugError | None = None
        """Why a rank gave up: other ranks must neither wait for it nor continue without it."""

    def meet(self, rank: int, members: Sequence[int], what: Any, deadline: Deadline) -> list[Any]:
        """The values of ``members`` in this round, once all have arrived.

        Raises:
            TimeoutError, PeerGoneError: names the missing ranks.
        """
        members = tuple(sorted(members))
        began = time.monotonic()
        with self.changed:
            self._check(rank, [])  # values of ranks that gave up afterwards are not used
            number = self.counts.get((rank, members), 0)
            self.counts[rank, members] = number + 1
            here = self.rounds.setdefault((members, number), {})
            here[rank] = what
            self.changed.notify_all()
            while missing := [member for member in members if member not in here]:
                self._check(rank, missing)
                if deadline.expired:
                    waited = f"rank {rank} waited {time.monotonic() - began:.3g} s in vain for"
                    self._break(TimeoutError(f"{waited} {_named(missing)}"))
                self.changed.wait(deadline.remaining())
            self._collect(members, number)
            return [here[member] for member in members]

    def _check(self, rank: int, missing: Sequence[int]) -> None:
        if rank in self.gone:
            raise ClosedError(f"rank {rank} was destroyed during the call")
        if self.broken is not None:
            raise type(self.broken)(str(self.broken))
        gone = [member for member in missing if member in self.gone]
        if gone:
            self._break(PeerGoneError(f"{_named(gone)} left before taking part"))

    def give_up(self, reason: str) -> None:
        """A rank takes part in no further call. The first reason is the error of all ranks."""
        with self.changed:
            if self.broken is None:
                self.broken = TransportError(reason)
                self.changed.notify_all()

    def _break(self, error: KvplugError) -> None:
        self.broken = error
        self.changed.notify_all()
        raise error

    def _collect(self, members: tuple[int, ...], number: int) -> None:
        """The last rank that collects a round removes it."""
        key = members, number
        self.collected[key] = self.collected.get(key, 0) + 1
        if self.collected[key] == len(members):
            del self.rounds[key], self.collected[key]

    def leave(self, rank: int) -> None:
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


class MemoryCommunicator(DeviceCommunicator):
    """The factory of the spec. All ranks are made together: rank 0 makes the exchange and sends its name."""

    exchange = Exchange

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        group, timeout = context.group, context.timeout_s
        self._everybody = range(self.world_size)
        if self.rank == 0:
            name = f"memory:{next(_numbers)}"
            _exchanges[name] = self._exchange = self.exchange(self.world_size)
            try:
                group.broadcast(name, 0, timeout)
                group.barrier(timeout)
            finally:
                del _exchanges[name]
            return
        name = group.broadcast(None, 0, timeout)
        found = _exchanges.get(name)
        group.barrier(timeout)
        if found is None:
            raise PeerGoneError("rank 0 of this communicator is not in this process")
        self._exchange = found

    def _meet(self, what: Any, deadline: Deadline) -> list[Any]:
        return self._exchange.meet(self.rank, self._everybody, what, deadline)

    def _compare(self, call: Mapping[str, Any], deadline: Deadline) -> Sequence[Mapping[str, Any]]:
        return self._meet(call, deadline)

    def _compare_pairs(
        self, calls: Mapping[int, Mapping[str, Any]], deadline: Deadline
    ) -> Mapping[int, Mapping[str, Any]]:
        here = self.rank
        found: dict[int, Mapping[str, Any]] = {}
        for peer in sorted(calls, key=lambda each: (min(each, here), max(each, here))):
            both = self._exchange.meet(here, (here, peer), calls[peer], deadline)
            found[peer] = both[0 if peer < here else 1]
        return found

    def _all_reduce(self, tensor: Tensor, deadline: Deadline) -> None:
        tensor.copy_(_sum(self._meet(tensor.clone(), deadline)))

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, deadline: Deadline) -> None:
        for output, part in zip(outputs, self._meet(tensor.clone(), deadline), strict=True):
            output.copy_(part)

    def _reduce_scatter(self, output: Tensor, inputs: list[Tensor], deadline: Deadline) -> None:
        everyones = self._meet([part.clone() for part in inputs], deadline)
        output.copy_(_sum([parts[self.rank] for parts in everyones]))

    def _broadcast(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        tensor.copy_(self._meet(tensor.clone(), deadline)[src])

    def _send(self, tensor: Tensor, dst: int, deadline: Deadline) -> None:
        self._exchange.meet(self.rank, (self.rank, dst), tensor.clone(), deadline)

    def _recv(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        both = self._exchange.meet(self.rank, (self.rank, src), None, deadline)
        tensor.copy_(both[0 if src < self.rank else 1])

    def _give_up(self, error: BaseException) -> None:
        self._exchange.give_up(f"rank {self.rank} has given up: {error}")

    def _destroy(self) -> None:
        self._exchange.leave(self.rank)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks, so that it is the same at every rank."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
