"""What a transport of kind "communicator" writes."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvplug.transport.communicator.rank_info import RankInfo

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug.net.deadline import Deadline


class Primitives(RankInfo, abc.ABC):
    """Tensors are contiguous, of one dtype, on ``self.device``, and there is more than one rank. Those of
    a list that is gathered into, or scattered, lie one behind the other, but for ``_gather``.

    Each raises TimeoutError or PeerGoneError that names the ranks that are missing, ClosedError after
    ``_destroy``.
    """

    @abc.abstractmethod
    def _all_reduce(self, tensor: Tensor, deadline: Deadline) -> None:
        """Replace the tensor by the sum of all ranks' tensors."""

    @abc.abstractmethod
    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, deadline: Deadline) -> None:
        """Fill ``outputs[r]`` with rank r's tensor. Their shapes may differ, also be empty."""

    @abc.abstractmethod
    def _reduce_scatter(self, output: Tensor, inputs: list[Tensor], deadline: Deadline) -> None:
        """Fill ``output`` with the sum of all ranks' ``inputs[this rank]``. Shapes may differ by rank."""

    @abc.abstractmethod
    def _broadcast(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        """Fill the tensor with that of rank ``src``."""

    @abc.abstractmethod
    def _send(self, tensor: Tensor, dst: int, deadline: Deadline) -> None:
        """Send to rank ``dst``; when it returns the tensor may be overwritten."""

    @abc.abstractmethod
    def _recv(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        """Fill the tensor with the one that rank ``src`` sends."""

    @abc.abstractmethod
    def _destroy(self) -> None:
        """Release everything, and wake this rank's calls and the calls of other ranks that need it."""

    def _gather(self, outputs: list[Tensor] | None, tensor: Tensor, dst: int, deadline: Deadline) -> None:
        """``outputs`` is given at ``dst`` only. By default one rank after another; a transport may override
        it.
        """
        if outputs is None:
            self._send(tensor, dst, deadline)
            return
        for rank, output in enumerate(outputs):
            if rank == dst:
                output.copy_(tensor)
            else:
                self._recv(output, rank, deadline)

    def _batch(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], deadline: Deadline
    ) -> None:
        """Send each tensor to its rank, and fill each of the others from its rank.

        By default one pair of ranks after another, in the same order at every rank; in a pair the lower rank
        sends first. So ranks cannot deadlock, though ``_send`` may wait for its receiver. A transport that
        can do all at once overrides it.
        """
        here = self.rank_in_group
        peers = {peer for _, peer in sends} | {peer for _, peer in recvs}
        for peer in sorted(peers, key=lambda each: (min(each, here), max(each, here))):
            out = [(self._send, tensor) for tensor, dst in sends if dst == peer]
            into = [(self._recv, tensor) for tensor, src in recvs if src == peer]
            for act, tensor in out + into if here < peer else into + out:
                act(tensor, peer, deadline)

    def _compare(self, call: Mapping[str, Any], deadline: Deadline) -> Sequence[Mapping[str, Any]]:
        """Every rank's ``call``, plain values. By default through the group; a transport may override it."""
        found: list[Mapping[str, Any]] = self.cpu_group.all_gather(dict(call), deadline.remaining())
        return found

    def _compare_pairs(
        self, calls: Mapping[int, Mapping[str, Any]], deadline: Deadline
    ) -> Mapping[int, Mapping[str, Any]]:
        """The next calls of some other ranks with this one, each of which receives ``calls[its rank]``."""
        for peer, call in calls.items():
            self.cpu_group.send(dict(call), peer)
        return {peer: self.cpu_group.recv(peer, deadline.remaining()) for peer in calls}

    def _give_up(self, error: BaseException) -> None:
        """A call failed after it had begun, and no other will begin: inform the other ranks where possible.

        Never waits, raises nothing.
        """

    def _synchronize(self, deadline: Deadline) -> None:
        """Wait for everything that calls have begun, if they return earlier. By default none does."""

    def _suspend(self) -> None:
        """Release what ``_resume`` can recreate."""

    def _resume(self) -> None:
        """Make it again."""
