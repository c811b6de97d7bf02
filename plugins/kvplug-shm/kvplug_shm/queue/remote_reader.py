"""The source of a remote reader: messages from the writer's network half.

A DEALER, whose bytes are carried over a proven connection to the writer's front door. Its thread receives
and assembles frames and reports their arrival to the writer, independently of the reader; it also reports how
many messages were read, which frees the writer's room. A broken connection is never restored: messages in
flight are lost, and the reader gets an error that says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import attrs
import zmq

from kvplug import (
    CapacityError,
    ConfigError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TransportError,
)
from kvplug.transport import (
    Deadline,
    MessageQueue,
    PeerIdentity,
    QueueEndpoint,
    Relay,
    Watch,
    WireError,
    peer_text,
)
from kvplug_shm.queue import remote_frames as frames
from kvplug_shm.queue.network import QueueMessage
from kvplug_shm.queue.reader_link import identity_of, observed
from kvplug_shm.queue.remote_assembly import Assembly
from kvplug_shm.queue.remote_contact import RemoteContact
from kvplug_shm.queue.remote_dialling import PROOF, connect, dial_writer, failure, use_keys
from kvplug_shm.queue.remote_frames import First, Over, Piece, Plain, QueueFrameKind
from kvplug_shm.queue.remote_inbox import Inbox
from kvplug_shm.queue.remote_thread import (
    BEATS_IN_PATIENCE,
    SETTLE_S,
    SHORTEST_PATIENCE_S,
    SocketThread,
)


class RemoteReader(SocketThread):
    """The messages of one reader."""

    def __init__(
        self,
        context: QueueEndpoint.Context,
        contact: RemoteContact,
        rank: int,
        max_message_bytes: int,
        deadline: Deadline,
    ) -> None:
        keys = contact.keys(context.credentials)
        connection = dial_writer(contact, context.credentials, deadline)
        self._contact = contact
        self._relay: Relay | None = None
        self._rank = rank
        self._inbox = Inbox()
        self._assembly = Assembly(max_message_bytes)
        self._writer: PeerIdentity | None = None
        self._watch: Watch | None = None
        self._reported: tuple[int, int, int] = (0, 0, 0)
        self._published = 0
        self._wants_ready = self._leaving = self._proven = self._died = False
        self._received_at = self._sent_at = time.monotonic()
        self._suspected = self._dying = self._left = 0.0
        name = f"reader rank {rank} of the queue at {contact}"
        try:
            super().__init__(zmq.DEALER, name, context.heartbeat_timeout_s, PROOF)
        except BaseException:
            connection.close()
            raise
        try:
            use_keys(self._socket, keys, rank)
            self._relay = connect(self._socket, connection)
            joining = {
                "version": frames.VERSION,
                "who": attrs.asdict(PeerIdentity.of_this_process()),
                "patience_s": float(self._patience_s),
            }
            self._send_frame(frames.plain(QueueFrameKind.JOIN, joining))
        except BaseException:
            self._let_go(0)
            connection.close()
            raise
        self.start()

    def __repr__(self) -> str:
        return f"<RemoteReader of rank {self._rank} at {self._contact}>"

    def join_queue(self, deadline: Deadline) -> None:
        """Return when the writer has admitted this reader. Raises as ``create_from_handle``."""
        late = (
            f"the writer at {self._contact} did not answer reader rank {self._rank} in time, with all that it"
            " has enqueued before"
        )
        self._inbox.wait_until_joined(deadline, late)

    # -- for the reader's thread ---------------------------------------------------------------

    @property
    def writer(self) -> str:
        return f"the writer ({self._writer} at {self._contact})"

    def poll(self) -> QueueMessage | None:
        return self._inbox.first()

    def receive(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> QueueMessage:
        return self._inbox.wait_for_first(wait, check)

    def advance(self) -> None:
        memory = self._inbox.take()
        if memory is not None:
            self._assembly.recycle(memory)
        self.post()

    def wait_until_ready(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> None:
        check()
        self._wants_ready = True
        self.post()
        self._inbox.wait_until_ready(wait, check)

    def wake(self) -> None:
        self._inbox.wake()

    def leave(self, *, died: bool) -> None:
        if died:
            self._died = True
            self.end(0)
        else:
            self._leaving = True
            self.post()
            self.join(SETTLE_S)  # or the goodbye is lost if the process ends now

    # -- the thread ----------------------------------------------------------------------------

    def _let_go(self, linger_ms: int) -> None:
        if self._watch is not None:
            self._watch.close()
        super()._let_go(linger_ms)
        if self._relay is not None:
            self._relay.abort() if self._died else self._relay.finish()
        self._inbox.fail(PeerGoneError, "this end has let go of its connection")

    def _failed(self, error: Exception) -> None:
        self._inbox.fail(TransportError, f"reader rank {self._rank} stops: {error}")

    def _turn(self, now: float) -> float | None:
        inbox = self._inbox
        self._receive_frames(now)
        for event, _ in list(self._connection_events()):
            self._see(event, now)
        if not inbox.ended:
            self._judge(now)
        if self._leaving:
            return self._leave(now)
        if inbox.ended:
            return None
        if self._wants_ready and self._send_frame(frames.plain(QueueFrameKind.READY)):
            self._wants_ready = False
        taken = self._taken()
        if taken != self._reported and self._send_frame(frames.taken(*taken)):
            self._reported = taken
        if self._writer is not None and now - self._sent_at >= self._beat_s:
            self._send_frame(frames.plain(QueueFrameKind.BEAT))
        return self._pause()

    def _taken(self) -> tuple[int, int, int]:
        return self._assembly.frames, self._assembly.arrived, self._inbox.read

    def _leave(self, now: float) -> float:
        """Send LEAVE and wait for the answer: closing with unread bytes could discard it."""
        if not self._left and not self._inbox.ended:
            self._left = now
            self._send_frame(frames.plain(QueueFrameKind.LEAVE))
        left_s = self._left + SETTLE_S - now
        if self._inbox.ended or left_s <= 0:
            self.end(0)
        return max(0.0, left_s)

    def _receive_frames(self, now: float) -> None:
        for parts in self._received():
            if self._inbox.ended:
                continue
            self._received_at, self._suspected = now, 0.0
            try:
                self._take(frames.read([part.buffer for part in parts]))
            except (WireError, TransportError, CapacityError) as e:
                kind: Callable[[str], KvplugError] = (
                    type(e) if isinstance(e, TransportError | CapacityError) else WireError
                )
                if isinstance(e, ResourceExhaustedError):
                    kind = partial(ResourceExhaustedError, resource=e.resource)
                self._inbox.fail(kind, f"reader rank {self._rank}, from {self.writer}: {e}")

    def _take(self, frame: frames.Frame) -> None:
        match frame:
            case First() | Piece():
                done = self._assembly.add(frame, self._inbox.nbytes)
                if done is not None:
                    self._inbox.put(*done)
                    self._join_if_due()
            case Plain(QueueFrameKind.READY):
                self._inbox.make_ready()
            case Plain(
                QueueFrameKind.WELCOME,
                {
                    "version": frames.VERSION,
                    "who": who,
                    "patience_s": float(patience_s),
                    "published": int(published),
                },
            ) if patience_s > 0 and self._writer is None:
                self._writer = identity_of(who)
                self._patience_s = min(self._patience_s, max(patience_s, SHORTEST_PATIENCE_S))
                try:
                    self._watch = observed(self._writer, self._has_ended)
                except PeerGoneError:
                    self._has_ended()
                self._published = published
                self._join_if_due()
            case Plain(QueueFrameKind.REFUSED, str(why)):
                self._inbox.fail(ConfigError, peer_text(why))
            case Over():
                self._over(frame)
            case Plain(QueueFrameKind.BEAT):
                pass
            case _:
                raise WireError("it speaks another version; install the same kvplug-shm on both ends")

    def _join_if_due(self) -> None:
        """Joined: it has all messages of before its join, so that none is lost if the writer dies."""
        if not self._inbox.joined and self._assembly.arrived >= self._published:
            self._inbox.join()

    def _has_ended(self) -> None:
        """The writer's process has ended; its last frames may still arrive. From any thread."""
        self._dying = time.monotonic()
        self.post()

    def _over(self, over: Over) -> None:
        lost = max(over.lost, over.total - self._assembly.arrived)
        losses = f"{lost} of {over.total} messages are lost to reader rank {self._rank}"
        if over.why:
            text = f"{self.writer} has evicted this reader ({over.why}): {losses}, and all that come later"
            self._inbox.fail(TransportError, text)
        elif lost:
            self._inbox.fail(TransportError, f"{self.writer} has closed in haste: {losses}")
        else:
            text = f"{self.writer} has closed, and everything of it was received"
            self._inbox.fail(PeerGoneError, text)

    def _see(self, event: int, now: float) -> None:
        """Handle an event of the connection."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._proven = True
        elif event == zmq.EVENT_DISCONNECTED:
            self._receive_frames(now)  # process the last frames before the end
            self._inbox.fail(PeerGoneError, self._how_it_ended())
        elif not self._proven:
            error = failure(event, self._contact, self._rank)
            if error is not None:
                self._inbox.fail(*error)

    def _how_it_ended(self) -> str:
        if self._writer is None:
            return f"the writer at {self._contact} hung up before reader rank {self._rank} had joined"
        how = "its process ended" if self._dying else "the connection ended"
        return (
            f"{self.writer} is gone: {how} after {self._assembly.arrived} messages had arrived at reader rank"
            f" {self._rank}; what it sent after them, if anything, is lost"
        )

    def _judge(self, now: float) -> None:
        if self._dying:
            if now - self._dying >= SETTLE_S:
                self._inbox.fail(PeerGoneError, self._how_it_ended())
        elif self._writer is not None and self._watch is None and now - self._received_at >= self._patience_s:
            # This process may have been stopped: read first what arrived meanwhile.
            self._suspected = self._suspected or now
            if now - self._suspected >= self._beat_s / 2:
                self._inbox.fail(
                    PeerGoneError,
                    f"{self.writer} is silent for {now - self._received_at:.1f} s, after"
                    f" {self._assembly.arrived} messages had arrived at reader rank {self._rank}",
                )

    @property
    def _beat_s(self) -> float:
        return self._patience_s / BEATS_IN_PATIENCE

    def _send_frame(self, frame: bytes) -> bool:
        """Send a frame. Returns whether there was room: none if the writer is stopped, or just ended."""
        self._sent_at = time.monotonic()
        try:
            self._put(frame)
        except zmq.Again:
            return False
        return True

    def _put(self, frame: bytes) -> None:
        self._socket.send(frame, zmq.NOBLOCK)

    def _pause(self) -> float | None:
        if self._writer is None:
            return None
        moments = [self._sent_at + self._beat_s]
        if self._dying or self._suspected or self._wants_ready or self._taken() != self._reported:
            moments.append(time.monotonic() + self._beat_s / 10)
        if self._watch is None:
            moments.append(self._received_at + self._patience_s)
        return max(0.0, min(moments) - time.monotonic())
