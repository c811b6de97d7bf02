"""The pipe "pynccl": two communicators of two ranks, one each way, and a connection that says when.

A sender announces a message over the connection and does nothing more. Only when the receiver is in
``recv_tensor``, with memory ready, does it clear the message, and only then are receive and send enqueued. So
no kernel waits on a GPU for somebody who is late, and a receive that runs out of time before that has lost
nothing. Neither direction waits for the other on the device: each has a communicator and a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Blocks,
    Connection,
    Deadline,
    ExclusiveUse,
    Pipe,
    Timeout,
    Transfer,
)
from kvplug_pynccl.device import Device
from kvplug_pynccl.nccl.library import Library
from kvplug_pynccl.pipe.content import content_of, content_of_blocks, nothing
from kvplug_pynccl.pipe.link import Link
from kvplug_pynccl.pipe.targets import Fresh, Into, IntoBlocks, Target
from kvplug_pynccl.pipe.way import Way

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class Tuning:
    """What a pipe needs to know beside its connection."""

    nccl: Library
    device: Device
    max_in_flight_bytes: int
    copy_bytes: int
    stage_cpu_tensors: bool
    check_order: bool
    timeout_s: float
    heartbeat_timeout_s: float


class PyncclPipe(Pipe):
    """The calls; :class:`Link` does what they ask for."""

    def __init__(
        self,
        connection: Connection,
        outgoing: Way,
        incoming: Way,
        tuning: Tuning,
        *,
        pidfd: int | None,
        heartbeat_s: float | None,
    ) -> None:
        """Takes what :class:`Link` takes."""
        self._tuning = tuning
        self._sending, self._receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self._link = Link(
            connection,
            outgoing,
            incoming,
            tuning.device,
            max_in_flight_bytes=tuning.max_in_flight_bytes,
            check_order=tuning.check_order,
            pidfd=pidfd,
            heartbeat_s=heartbeat_s,
        )
        self._lifecycle = self._link.lifecycle

    def __repr__(self) -> str:
        return f"<PyncclPipe to {self.peer}, {self._link.state}>"

    @property
    def closed(self) -> bool:
        return self._lifecycle.closed

    @property
    def peer(self) -> str:
        return self._link.peer

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        if self._lifecycle.ended:
            raise self._lifecycle.error()
        with self._sending.taken():
            deadline = Deadline.after(timeout, self._tuning.timeout_s)
            if tensor is None:
                content = nothing()
            else:
                content = content_of(
                    tensor,
                    self._tuning.device,
                    stage=self._tuning.stage_cpu_tensors,
                    copy_bytes=self._tuning.copy_bytes,
                )
            return self._link.outbox.send(content, deadline)

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        if out is None:
            return self._receive(Fresh(self._tuning.device), timeout)
        return self._receive(Into(out, self._tuning.device, stage=self._tuning.stage_cpu_tensors), timeout)

    def send_blocks(
        self, views: Sequence[Tensor], block_ids: Sequence[int], *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Transfer:
        if self._lifecycle.ended:
            raise self._lifecycle.error()
        with self._sending.taken():
            deadline = Deadline.after(timeout, self._tuning.timeout_s)
            content = content_of_blocks(
                Blocks(views, block_ids), self._tuning.device, copy_bytes=self._tuning.copy_bytes
            )
            return self._link.outbox.send(content, deadline)

    def recv_blocks(
        self, views: Sequence[Tensor], block_ids: Sequence[int], *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> None:
        if self._lifecycle.closed or self._lifecycle.broken:
            raise self._lifecycle.error()
        blocks = Blocks(views, block_ids)
        blocks.check_distinct()
        self._receive(IntoBlocks(blocks, self._tuning.device), timeout)

    def _receive(self, target: Target, timeout: Timeout) -> Tensor | None:
        # A peer that is gone may have left a whole message here: only a pipe closed here is over.
        if self._lifecycle.closed or self._lifecycle.broken:
            raise self._lifecycle.error()
        with self._receiving.taken():
            return self._link.inbox.receive(target, Deadline.after(timeout, self._tuning.timeout_s))

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._link.close(Deadline.after(timeout, self._tuning.timeout_s))

    def abort(self) -> None:
        self._link.abort()
