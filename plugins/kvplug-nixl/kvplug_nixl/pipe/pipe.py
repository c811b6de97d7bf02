"""The pipe "nixl": each end reads messages from the other end's memory, with NIXL.

A sender registers the memory of a message and offers it to the peer over their channel. The receiver reads it
to where it belongs, makes sure that the sender has not taken it back, and says that it has it. Small messages
travel over the channel.

One thread, the reader, receives frames, notices the peer's end, and serves the peer's reads where UCX needs
that. Callers send and receive in their own threads.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError
from kvplug.transport import (
    BackgroundThread,
    Blocks,
    Channel,
    Deadline,
    DuplexPipe,
    NamedExhaustion,
    Pipe,
    Timeout,
    Transfer,
    Watch,
    WireError,
)
from kvplug_nixl.agent import Agent
from kvplug_nixl.pipe.announced import AnnouncedMessages
from kvplug_nixl.pipe.content import Target, content_of, content_of_blocks
from kvplug_nixl.pipe.fence import OwnFence, PeerFence
from kvplug_nixl.pipe.frames import FrameKind, decode
from kvplug_nixl.pipe.inbox import Inbox
from kvplug_nixl.pipe.lanes import Lanes
from kvplug_nixl.pipe.outbox import Outbox

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S: Final = 1.0
"""Seconds between two looks of the reader at the pipe's state, while no frame arrives."""
_HELP_S: Final = (100e-6, 5e-3)
"""Seconds between two times in which the reader serves the peer's read: at first, and at most."""
_SEND_S: Final = 5.0
"""Seconds that the peer may take to read a frame. The connection holds all frames that may be unread."""
_JOIN_S: Final = 1.0
"""Seconds that ``close`` waits until everything is given back."""


@attrs.frozen(kw_only=True)
class NixlPipeSettings(DuplexPipe.Settings):
    """What a pipe needs to know besides its connection and agent. Sizes are in bytes."""

    device: str
    max_in_flight_bytes: int
    inline_bytes: int
    expected_gb_per_s: float


class NixlPipe(DuplexPipe):
    """One channel, one agent, and a fence at each end."""

    def __init__(
        self,
        channel: Channel,
        agent: Agent,
        fences: tuple[OwnFence, PeerFence],
        lanes: Lanes,
        settings: NixlPipeSettings,
        *,
        peer: str,
        silence_s: float | None,
    ) -> None:
        """Owns all of it from here on, unless it raises.

        ``silence_s``: seconds of silence that both ends take for death, with heartbeats, because one of them
        does not see the other's process; ``None``: both see it, and send none.

        Raises:
            ResourceExhaustedError: there are no more threads.
        """
        super().__init__(peer, settings, device=settings.device)
        self.lanes: Final = lanes
        self._expected_gb_per_s = settings.expected_gb_per_s
        """What carries the reads of this end."""
        self._channel = channel
        self._agent = agent
        self._fence, their_fence = fences
        self._silence_s = silence_s
        self._help_until_taken = False
        self._announced = AnnouncedMessages(self._lifecycle)
        self._outbox = Outbox(
            agent,
            inline_bytes=settings.inline_bytes,
            peer=peer,
            limit=settings.max_in_flight_bytes,
            lifecycle=self._lifecycle,
            announce=self._send_frame,
            fail_pipe=self._fail,
        )
        self._inbox = Inbox(
            agent,
            self._announced,
            their_fence,
            device=settings.device,
            needs_help=lanes.need_help,
            peer=peer,
            message_limit=self._limit,
            lifecycle=self._lifecycle,
            taken=lambda: self._send_frame([FrameKind.TAKEN.value, 1]),
            ask_for_help=lambda: self._send_frame([FrameKind.READING.value]),
            fail_pipe=self._fail,
        )
        runs = queue.SimpleQueue[bool]()
        self._reader = BackgroundThread(self._read, args=(runs,), name="kvplug-nixl-read", stop=self.abort)
        with NamedExhaustion("a pipe needs a thread"):
            self._reader.start()
        runs.put(True)

    @property
    def route(self) -> str:
        """The lanes of this end's reads."""
        return f"nixl {self.lanes.text}"

    def path_report(self) -> Pipe.PathReport:
        return Pipe.PathReport(
            measured_gb_per_s=self.lanes.gb_per_s,
            expected_gb_per_s=self._expected_gb_per_s,
            reason=f"UCX reads through {self.lanes.text}: {self.lanes.reason()}",
        )

    # -- moving bytes ----------------------------------------------------------------------------------

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        return self._outbox.send(content_of(tensor), self._deadline(timeout))

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        return self._inbox.receive(Target(out=out), self._deadline(timeout))

    def _send_blocks(self, blocks: Blocks, timeout: Timeout) -> Transfer:
        return self._outbox.send(content_of_blocks(blocks), self._deadline(timeout))

    def _receive_blocks(self, blocks: Blocks, timeout: Timeout) -> None:
        self._inbox.receive(Target(blocks=blocks), self._deadline(timeout))

    # -- how it ends -----------------------------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        self._announced.stop()
        if threading.current_thread() is not self._reader:  # in a transfer's callback it has to go on
            self._outbox.drain(deadline)

    def _release(self) -> None:
        """The reader, which is woken, gives everything back."""
        self._fence.take_back()  # before anything tells that memory is the caller's again
        self._announced.stop()
        self._outbox.fail()
        self._channel_ends()

    def _channel_ends(self) -> None:
        """Say goodbye if nothing has to wait for that, and wake the reader."""
        if not self._let_go:
            with contextlib.suppress(KvplugError, OSError):
                self._channel.send([FrameKind.GOODBYE.value], timeout=0)
        self._channel.close()

    def _on_peer_gone(self) -> None:
        """What came inline can still be received."""
        self._fence.take_back()
        self._announced.expect_no_more()
        self._outbox.fail()

    def _join_threads(self) -> None:
        if threading.current_thread() is not self._reader:
            self._reader.join(_JOIN_S)

    # -- sending frames, in any thread, maybe with locks -------------------------------------------------

    def _send_frame(self, frame: list[Any]) -> None:
        try:
            self._channel.send(frame, timeout=_SEND_S)
        except (ClosedError, PeerGoneError, WireError):
            pass  # the reader notices it, and ends the pipe
        except TimeoutError as e:
            self._lifecycle.fail(f"the peer does not read: {e}")  # the reader ends it

    # -- the reader ------------------------------------------------------------------------------------

    def _read(self, runs: queue.SimpleQueue[bool]) -> None:
        """Until the pipe has ended."""
        runs.get()
        try:
            self._read_frames()
        except PeerGoneError as e:
            self._peer_gone(str(e))
        except ClosedError:
            pass
        except BaseException as e:
            if not self._let_go:
                self._fail(f"its frames are not read any more: {e}")
        finally:
            self._channel.close()
            self._inbox.close()
            self._outbox.forget()

    def _read_frames(self) -> None:
        silence_s = self._silence_s
        interval_s = _POLL_S if silence_s is None else silence_s / Watch.Terms.BEATS_PER_TIMEOUT
        heard = next_beat = time.monotonic()
        help_s, longest = _HELP_S
        while True:
            value: Any = None
            try:
                value = self._channel.recv(help_s if self._help_until_taken else interval_s)
            except TimeoutError:
                pass
            now = time.monotonic()
            if value is not None:
                heard = now
                if self._handle(value):
                    return
                help_s = _HELP_S[0]
            if self._help_until_taken:
                self._agent.progress()
                help_s = min(1.2 * help_s, longest)
            if silence_s is not None:
                if now - heard >= silence_s:
                    raise PeerGoneError(f"silent for {now - heard:.1f} s")
                if now >= next_beat:
                    next_beat = now + interval_s
                    self._send_frame([FrameKind.HEARTBEAT.value])
            if self._lifecycle.broken:
                if not self._let_go:
                    self._end()
                return

    def _handle(self, value: Any) -> bool:
        """A frame has come. Whether it is the last one."""
        try:
            kind, content = decode(value)
            if kind is FrameKind.GOODBYE:
                lost = self._announced.has_offers
                reason = "it ended before its messages were taken" if lost else self._lifecycle.CLOSED_BY_PEER
                self._lifecycle.lose_peer(reason)
                self._on_peer_gone()
                return True
            if kind in (FrameKind.INLINE, FrameKind.OFFER):
                self._announced.add(content)
            elif kind is FrameKind.TAKEN:
                self._help_until_taken = False
                self._outbox.taken(content)
            elif kind is FrameKind.READING:
                self._help_until_taken = self._outbox.is_lending
        except WireError as e:
            self._fail(f"the peer sent what cannot be: {e}")
            return True
        return False
