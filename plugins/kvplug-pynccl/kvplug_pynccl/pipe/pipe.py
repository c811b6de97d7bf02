"""The pipe "pynccl": two communicators of two ranks, one each way, and a connection that says when.

A sender announces a message over the connection and does nothing more. Only when the receiver is in
``recv_tensor``, with memory ready, does it clear the message, and only then are receive and send enqueued. So
no kernel waits on a GPU for a peer that is late, and a receive that runs out of time before that has lost
nothing. Neither direction waits for the other on the device: each has a communicator and a stream of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvplug.transport import (
    Blocks,
    Deadline,
    DuplexPipe,
    Timeout,
    Transfer,
)
from kvplug_pynccl.device import Device
from kvplug_pynccl.nccl.library import Library
from kvplug_pynccl.pipe.content import content_of, content_of_blocks
from kvplug_pynccl.pipe.control import ControlConnection
from kvplug_pynccl.pipe.direction import Direction
from kvplug_pynccl.pipe.frames import GOODBYE
from kvplug_pynccl.pipe.inbox import Inbox
from kvplug_pynccl.pipe.outbox import Outbox
from kvplug_pynccl.pipe.targets import IntoBlocks, IntoTensor, NewTensor
from kvplug_pynccl.pipe.worker import PipeWorker

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class PyncclPipeSettings(DuplexPipe.Settings):
    """What a pipe needs to know beside its connection. Sizes are in bytes."""

    nccl: Library
    device: Device
    max_in_flight_bytes: int
    copy_bytes: int
    stage_cpu_tensors: bool
    check_order: bool


class PyncclPipe(DuplexPipe):
    """One connection, two communicators, two streams, and one thread, the worker, that calls NCCL.

    The process's liveness watcher looks at the peer.
    """

    def __init__(
        self,
        control: ControlConnection,
        outgoing: Direction,
        incoming: Direction,
        settings: PyncclPipeSettings,
        *,
        pidfd: int | None,
        silence_s: float | None,
    ) -> None:
        """Owns the connection and the peer's ``pidfd`` from here on, and the directions if it does not raise.

        ``silence_s``: seconds of silence that both ends take for death; ``None``: they see it.
        """
        super().__init__(control.peer, settings, device=settings.device.name)
        self._settings = settings
        self.control = control
        """Carries the frames."""
        self.outbox = Outbox(
            outgoing,
            peer=self._peer,
            limit=settings.max_in_flight_bytes,
            lifecycle=self._lifecycle,
            send_frame=control.send,
            wake_worker=control.wake,
            fail_pipe=self._fail,
        )
        self.inbox = Inbox(
            incoming,
            settings.device,
            peer=self._peer,
            message_limit=self._limit,
            check_order=settings.check_order,
            lifecycle=self._lifecycle,
            send_frame=control.send,
            wake_worker=control.wake,
            fail_pipe=self._fail,
        )
        self._worker = PipeWorker(
            control,
            self.outbox,
            self.inbox,
            settings.device,
            lifecycle=self._lifecycle,
            silence_s=silence_s,
            lost=self._peer_gone,
            fail_pipe=self._fail,
        )
        self._worker.start(pidfd)

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        settings = self._settings
        content = content_of(
            tensor, settings.device, stage=settings.stage_cpu_tensors, copy_bytes=settings.copy_bytes
        )
        return self.outbox.send(content, self._deadline(timeout))

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        device, deadline = self._settings.device, self._deadline(timeout)
        if out is None:
            return self.inbox.receive(NewTensor(device), deadline)
        return self.inbox.receive(IntoTensor(out, device, stage=self._settings.stage_cpu_tensors), deadline)

    def _send_blocks(self, blocks: Blocks, timeout: Timeout) -> Transfer:
        content = content_of_blocks(blocks, self._settings.device, copy_bytes=self._settings.copy_bytes)
        return self.outbox.send(content, self._deadline(timeout))

    def _receive_blocks(self, blocks: Blocks, timeout: Timeout) -> None:
        self.inbox.receive(IntoBlocks(blocks, self._settings.device), self._deadline(timeout))

    # -- how it ends -----------------------------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        self.inbox.wake_callers()
        if not self._worker.is_current():  # else nothing is sent while a callback of a transfer waits
            if self.outbox.drain(deadline):
                self.control.send(GOODBYE)

    def _release(self) -> None:
        self._worker.stop()

    def _join_threads(self) -> None:
        self._worker.join()
