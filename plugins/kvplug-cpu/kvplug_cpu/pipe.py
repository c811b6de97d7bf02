"""The pipe "cpu": an outbox and an inbox over the same lanes, and a watch on the peer."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from kvplug.net.wire.messages import GOODBYE
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Connection,
    Deadline,
    Fate,
    Heartbeat,
    Pipe,
    Timeout,
    Transfer,
    Turn,
    close_after_fork,
    watch,
)
from kvplug_cpu.descriptors import Descriptors
from kvplug_cpu.inbox import Inbox
from kvplug_cpu.lane import Lane
from kvplug_cpu.message import Content
from kvplug_cpu.outbox import Outbox

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Tuning:
    """What a pipe needs to know beside its connections."""

    max_in_flight_bytes: int
    split_bytes: int
    socket_buffer_bytes: int
    timeout_s: float
    heartbeat_timeout_s: float


class CpuPipe(Pipe):
    """One control connection, which is only watched, and one or more lanes for tensors.

    Threads: up to one writer per lane and one reader per lane but the first, started by the first
    message that needs them, gone with the pipe. The process's liveness watcher looks at the peer.
    """

    def __init__(
        self,
        control: Connection,
        lanes: list[Connection],
        tuning: Tuning,
        *,
        pidfd: int | None,
        heartbeat_interval_s: float | None,
    ) -> None:
        """Owns the connections and the peer's ``pidfd`` from here on.

        ``heartbeat_interval_s``: at least one of the two ends has no pidfd of the other, as both have
        found out, so both beat that often.
        """
        self._peer = control.describe
        self._timeout_s = tuning.timeout_s
        self._fate = Fate(f"the pipe to {self._peer}")
        self._control = control
        self._lanes = [Lane(c.sock, buffer_bytes=tuning.socket_buffer_bytes) for c in lanes]
        self._descriptors = Descriptors(self._close_sockets, self._fate.error)
        self._split_bytes = tuning.split_bytes
        self._sending, self._receiving = Turn("sending"), Turn("receiving")
        self._outbox = Outbox(
            self._lanes,
            peer=self._peer,
            limit=tuning.max_in_flight_bytes,
            fate=self._fate,
            lost=self._sending_lost,
            break_down=self._break_down,
            enter=self._descriptors.enter,
            leave=self._descriptors.leave,
        )
        self._inbox = Inbox(
            self._lanes,
            peer=self._peer,
            fate=self._fate,
            lost=self._peer_gone,
            break_down=self._break_down,
            enter=self._descriptors.enter,
            leave=self._descriptors.leave,
        )
        close_after_fork(self)
        beat = None
        if heartbeat_interval_s is not None:
            beat = Heartbeat(
                control.sock, interval_s=heartbeat_interval_s, timeout_s=tuning.heartbeat_timeout_s
            )
        try:
            self._watch = watch(
                pidfd=pidfd, sock=None if beat else control.sock, heartbeat=beat, on_gone=self._peer_gone
            )
        finally:
            if pidfd is not None:
                os.close(pidfd)  # the watch has its own

    def __repr__(self) -> str:
        state = "closed" if self._fate.closed else "ended" if self._fate.sealed else "open"
        return f"<CpuPipe to {self._peer}, {state}>"

    @property
    def closed(self) -> bool:
        return self._fate.closed

    @property
    def peer(self) -> str:
        return self._peer

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        if self._fate.sealed:
            raise self._fate.error()
        with self._sending.taken(), self._descriptors:
            content = Content.of(tensor, self._split_bytes)
            return self._outbox.send(content, Deadline.after(timeout, self._timeout_s))

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        # A peer that is gone may have left whole messages behind: only a pipe closed here is over.
        if self._fate.closed or self._fate.broken:
            raise self._fate.error()
        with self._receiving.taken(), self._descriptors:
            return self._inbox.receive(out, Deadline.after(timeout, self._timeout_s))

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        if not self._fate.close("is closed"):
            return
        for lane in self._lanes:
            lane.stop_receiving()
        if self._outbox.drain(deadline):
            self._say_goodbye(deadline)
        self._end()
        self._outbox.join()
        self._inbox.join()

    def abort(self) -> None:
        # Also ends a close() that is still draining in another thread.
        if self._fate.close("was aborted") or not self._descriptors.retired:
            self._end()

    def _say_goodbye(self, deadline: Deadline) -> None:
        """After the last message. There is no event for delivery: ask, in steps of at most 10 ms."""
        if not self._descriptors.enter():
            return
        try:
            self._lanes[0].send_now([memoryview(GOODBYE)])
            pause = 0.0001
            while any(lane.undelivered() for lane in self._lanes):
                if deadline.expired or self._descriptors.retired or self._fate.peer_lost:
                    return
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        except OSError:
            pass  # the peer was faster
        finally:
            self._descriptors.leave()

    def _end(self) -> None:
        """Wake everybody, and let go of everything. Blocks nowhere."""
        for lane in self._lanes:
            lane.stop()
        self._outbox.fail()
        self._inbox.stop()
        self._watch.close()
        self._descriptors.retire()

    def _close_sockets(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._control.close()

    def _after_fork_in_child(self) -> None:
        self._fate.inherit()
        self._descriptors.disown()
        self._outbox.inherit()

    # -- bad news, from any thread -------------------------------------------------------------------

    def _peer_gone(self, reason: str) -> None:
        """What the kernel already holds can still be received: the lanes end only after it."""
        if self._fate.lose_peer(reason):
            logger.debug("%r: %s", self, reason)
        self._stop_lanes()

    def _sending_lost(self, reason: str) -> None:
        """A lane takes nothing more. What the peer sent before it went is not thrown away."""
        self._fate.lose_peer(reason)
        # Not over the other lanes either: what fails now is the caller's to overwrite.
        self._with_lanes(Lane.stop_sending)
        self._outbox.fail()

    def _break_down(self, reason: str) -> None:
        if self._fate.break_down(reason):
            logger.warning("%r: %s", self, reason)
        self._stop_lanes()

    def _stop_lanes(self) -> None:
        self._with_lanes(Lane.stop)
        self._outbox.fail()

    def _with_lanes(self, call: Callable[[Lane], None]) -> None:
        if self._descriptors.enter():
            for lane in self._lanes:
                call(lane)
            self._descriptors.leave()
