"""From one rank of the group to another, one tensor or many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.errors import UnsupportedError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.transport.communicator.calls import plain, write_back
from kvplug.transport.communicator.checked_calls import CheckedCalls

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@attrs.frozen
class SendOp:
    """In a batch: send ``tensor`` to rank ``dst`` of the group."""

    tensor: Any
    """A tensor of the communicator's device."""
    dst: int
    """A rank of the group."""


@attrs.frozen
class RecvOp:
    """In a batch: fill ``tensor`` with what rank ``src`` of the group sends."""

    tensor: Any
    """A contiguous tensor of the communicator's device, of the shape and dtype that is sent."""
    src: int
    """A rank of the group."""


class PointToPoint(CheckedCalls):
    """Calls in which only the named ranks take part."""

    def send(self, tensor: Tensor, dst: int | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send to rank ``dst`` of the group; the next rank by default.

        Raises:
            TensorMismatchError: the other rank wants another shape or dtype; at both ends.
            ConfigError: ``dst`` is no other rank of the group.
            The rest as the collectives.
        """
        peer = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        with self._pairs_call([(tensor, peer)], [], timeout) as deadline:
            self._send(plain(tensor), peer, deadline)

    def recv(
        self,
        size: Sequence[int],
        dtype: torch.dtype,
        src: int | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Tensor:
        """A tensor of that shape from rank ``src`` of the group; the previous rank by default.

        Raises as ``send``.
        """
        import torch

        peer = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_usable()
        tensor = torch.empty(tuple(size), dtype=dtype, device=self.device)
        with self._pairs_call([], [(tensor, peer)], timeout) as deadline:
            self._recv(tensor, peer, deadline)
        return tensor

    def batch_isend_irecv(
        self, p2p_ops: Sequence[SendOp | RecvOp], *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> None:
        """Send and receive all of these at once; returns when all are done.

        Messages to one rank are received there in the same order, by a batch or by ``recv``. No order of
        ranks can deadlock: two ranks may both send to each other.

        Raises:
            TensorMismatchError: another rank's ops do not fit these. With one other rank nothing was begun;
                where a batch has several, the others may have, and the communicator is broken.
            ConfigError: an op names no other rank of the group.
            UnsupportedError: something is no op.
            The rest as the collectives.
        """
        self._check_usable()
        for op in p2p_ops:
            if not isinstance(op, (SendOp, RecvOp)):
                raise UnsupportedError(f"a SendOp or a RecvOp is needed, not a {type(op).__qualname__}")
        sends = [(op.tensor, op.dst) for op in p2p_ops if isinstance(op, SendOp)]
        recvs = [(op.tensor, op.src) for op in p2p_ops if isinstance(op, RecvOp)]
        with self._pairs_call(sends, recvs, timeout) as deadline:
            into = [(plain(tensor), src) for tensor, src in recvs]
            self._batch([(plain(tensor), dst) for tensor, dst in sends], into, deadline)
            for (tensor, _), (work, _) in zip(recvs, into, strict=True):
                write_back(tensor, work)
