"""Collectives: every rank of the group calls the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.transport.communicator.calls import check_divisible, check_sum, empty, joined, plain, write_back
from kvplug.transport.communicator.checked_calls import CheckedCalls

if TYPE_CHECKING:
    from torch import Tensor


class Collectives(CheckedCalls):
    """Sums, concatenations, and parts of either."""

    def all_reduce(self, input_: Tensor, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """Replace ``input_`` by the sum of all ranks' and return it.

        Raises:
            TensorMismatchError: the ranks' tensors differ in shape or dtype, or their calls do.
            UnsupportedError: device or dtype are not taken.
            TimeoutError, PeerGoneError: a rank did not come, or has died; names it.
            TransportError: the communicator is broken, and since when.
            ClosedError, BusyError: as the law says. All these hold for every collective below.
        """
        with self._call(
            "all_reduce", timeout, lambda: self._said(input_, summing=True, filled=True)
        ) as deadline:
            if self.world_size > 1:
                work = plain(input_)
                self._all_reduce(work, deadline)
                write_back(input_, work)
        return input_

    def all_gather(self, input_: Tensor, dim: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """All ranks' tensors, of one shape, concatenated along ``dim`` in the order of ranks."""
        with self._call("all_gather", timeout, lambda: self._said(input_, dim=dim)) as deadline:
            if self.world_size == 1:
                return input_
            length = input_.shape[dim]
            return self._gathered(input_, dim % input_.dim(), [length] * self.world_size, deadline)

    def all_gatherv(
        self,
        input_: Tensor | list[Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Any:
        """Like ``all_gather``, with ``sizes[rank]`` elements along ``dim`` from each rank.

        Without ``sizes`` all have as many. A list of tensors gives a list: each is gathered that way.
        """
        tensors = input_ if isinstance(input_, list) else [input_]

        def check() -> dict[str, Any]:
            said = [self._said(tensor, dim=dim, sizes=sizes, vary=True) for tensor in tensors]
            return {"tensors": said, "list": isinstance(input_, list)}

        with self._call("all_gatherv", timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            made = []
            for tensor in tensors:
                lengths = [tensor.shape[dim]] * self.world_size if sizes is None else list(sizes)
                made.append(self._gathered(tensor, dim % tensor.dim(), lengths, deadline))
            return made if isinstance(input_, list) else made[0]

    def reduce_scatter(self, input_: Tensor, dim: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """This rank's part of the sum of all ranks' tensors, cut into equal parts along ``dim``."""

        def check() -> dict[str, Any]:
            said = self._said(input_, dim=dim, summing=True)
            check_divisible(input_.shape[dim], dim, self.world_size)
            return said

        with self._call("reduce_scatter", timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            part = input_.shape[dim] // self.world_size
            return self._scattered(input_, dim % input_.dim(), [part] * self.world_size, deadline)

    def reduce_scatterv(
        self,
        input_: Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Tensor:
        """Like ``reduce_scatter``, with ``sizes[rank]`` elements along ``dim`` for each rank; equal ones if
        ``None``.
        """
        if sizes is None:
            return self.reduce_scatter(input_, dim, timeout=timeout)

        def check() -> dict[str, Any]:
            said = self._said(input_, dim=dim, sizes=sizes, summing=True)
            check_sum(input_.shape[dim], dim, sizes)
            return said

        with self._call("reduce_scatterv", timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            return self._scattered(input_, dim % input_.dim(), list(sizes), deadline)

    def gather(
        self, input_: Tensor, dst: int = 0, dim: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Tensor | None:
        """At rank ``dst`` of the group what ``all_gather`` gives; ``None`` at all others.

        Raises ConfigError too: ``dst`` is no rank of the group.
        """

        def check() -> dict[str, Any]:
            self._check_rank("dst", dst)
            return self._said(input_, dim=dim, root=dst)

        with self._call("gather", timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            work = plain(input_)
            if self.rank_in_group != dst:
                self._gather(None, work, dst, deadline)
                return None
            parts = [empty(work, work.shape) for _ in self.ranks]
            self._gather(parts, work, dst, deadline)
            return joined(parts, dim)

    def broadcast(self, tensor: Tensor, src: int = 0, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """Fill ``tensor`` with rank ``src``'s of the group, and return it. Raises as ``gather``."""

        def check() -> dict[str, Any]:
            self._check_rank("src", src)
            return self._said(tensor, root=src, filled=True)

        with self._call("broadcast", timeout, check) as deadline:
            if self.world_size > 1:
                work = plain(tensor)
                self._broadcast(work, src, deadline)
                write_back(tensor, work)
        return tensor
