"""The pipe "cpu": an outbox and an inbox over the same data connections, and a watch on the peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from kvplug.net.wire.messages import GOODBYE
from kvplug.transport import (
    Connection,
    Deadline,
    DescriptorGuard,
    DuplexPipe,
    Timeout,
    Transfer,
    Watch,
)
from kvplug_cpu.data_connection import DataConnection
from kvplug_cpu.inbox import Inbox
from kvplug_cpu.outbox import Outbox

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class CpuPipeSettings(DuplexPipe.Settings):
    """The settings of a pipe. Sizes are in bytes."""

    max_in_flight_bytes: int
    split_bytes: int
    socket_buffer_bytes: int


class CpuPipe(DuplexPipe):
    """One control connection, which is only watched, and one or more data connections for tensors.

    Threads: up to one writer per data connection and one reader per data connection but the first, started by
    the first message that needs them, gone with the pipe. The process's liveness watcher looks at the peer.
    """

    def __init__(
        self,
        control: Connection,
        data: list[Connection],
        settings: CpuPipeSettings,
        *,
        pidfd: int | None,
        heartbeat_interval_s: float | None,
    ) -> None:
        """Takes ownership of the connections and of the peer's ``pidfd``.

        ``heartbeat_interval_s``: set if at least one of the two ends has no pidfd of the other; then both
        send heartbeats this often.
        """
        super().__init__(control.describe, settings)
        self._control = control
        self._data = [DataConnection(each.sock, buffer_bytes=settings.socket_buffer_bytes) for each in data]
        self._descriptors = DescriptorGuard(self._close_sockets, self._lifecycle.error)
        self._outbox = Outbox(
            self._data,
            peer=self._peer,
            limit=settings.max_in_flight_bytes,
            split_bytes=settings.split_bytes,
            lifecycle=self._lifecycle,
            descriptors=self._descriptors,
            lost=self._sending_lost,
            fail=self._fail,
            stop=self.abort,
        )
        self._inbox = Inbox(
            self._data,
            peer=self._peer,
            message_limit=self._limit,
            lifecycle=self._lifecycle,
            descriptors=self._descriptors,
            lost=self._peer_gone,
            fail=self._fail,
            stop=self.abort,
        )
        self._watch = Watch(
            pidfd=pidfd,
            sock=control.sock,
            interval_s=heartbeat_interval_s,
            timeout_s=settings.heartbeat_timeout_s,
            on_gone=self._peer_gone,
        )

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        with self._descriptors:
            return self._outbox.send(tensor, self._deadline(timeout))

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        with self._descriptors:
            return self._inbox.receive(out, self._deadline(timeout))

    # -- how it ends -----------------------------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        for each in self._data:
            each.stop_receiving()
        if self._outbox.drain(deadline):
            self._say_goodbye(deadline)

    def _say_goodbye(self, deadline: Deadline) -> None:
        """Wait for the delivery of the last message. There is no event for it: poll, at most every 10 ms."""
        if not self._descriptors.enter():
            return
        try:
            self._data[0].send_now([memoryview(GOODBYE)])
            pause = 0.0001
            while any(each.undelivered() for each in self._data):
                if deadline.expired or self._descriptors.retired or self._lifecycle.peer_lost:
                    return
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        except OSError:
            pass  # the peer was faster
        finally:
            self._descriptors.leave()

    def _release(self) -> None:
        for each in self._data:
            each.stop()
        self._outbox.fail()
        self._inbox.stop()
        self._watch.close()
        self._descriptors.retire()

    def _join_threads(self) -> None:
        self._outbox.join()
        self._inbox.join()

    def _close_sockets(self) -> None:
        for each in self._data:
            each.close()
        self._control.close()

    def _on_peer_gone(self) -> None:
        # Bytes in the kernel can still be received: the connections end only after them.
        self._stop_data(DataConnection.stop)

    def _on_failure(self) -> None:
        self._stop_data(DataConnection.stop)

    def _sending_lost(self, reason: str) -> None:
        """A connection accepts nothing more. Messages that the peer sent before are kept."""
        self._lifecycle.lose_peer(reason)
        # Stop the other connections too: the caller may overwrite tensors whose transfers fail now.
        self._stop_data(DataConnection.stop_sending)

    def _stop_data(self, stop: Callable[[DataConnection], None]) -> None:
        if self._descriptors.enter():
            for each in self._data:
                stop(each)
            self._descriptors.leave()
        self._outbox.fail()
