"""A reader elsewhere: what comes from the writer's far half, as the source of the reader's end.

A DEALER with a connection of its own. Its thread takes in whatever comes, puts it together and says so to the
writer, whatever the reader does; what the reader has read is told as well, and is the writer's room. A
connection is never made again: what was on its way when it broke is lost, and the reader hears it.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import zmq

from kvplug import (
    AuthenticationError,
    ConfigError,
    Deadline,
    KvplugError,
    PeerGoneError,
    PeerIdentity,
    QueueContext,
    TimeoutError,
    TransportError,
    Wait,
    Watch,
    WireError,
    this_process,
)
from kvplug_shm.queue import remote_frames as frames
from kvplug_shm.queue.far import Message
from kvplug_shm.queue.remote_assembly import Assembly
from kvplug_shm.queue.remote_contact import RemoteContact
from kvplug_shm.queue.remote_frames import First, Kind, Over, Piece, Plain
from kvplug_shm.queue.remote_link import identity_of, observed
from kvplug_shm.queue.remote_thread import SETTLE_S, SocketThread, in_words

_UNPROVEN = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)


class RemoteReader(SocketThread):
    """The messages of one reader."""

    def __init__(
        self, context: QueueContext, contact: RemoteContact, rank: int, max_message_bytes: int
    ) -> None:
        keys = contact.keys(context.credentials)
        self._contact = contact
        self._rank = rank
        self._changed = threading.Condition()  # guards what follows, up to the blank line
        self._messages: deque[tuple[Message, mmap.mmap | None]] = deque()
        self._error: tuple[type[KvplugError], str] | None = None
        self._joined = False
        self._ready = False

        self._assembly = Assembly(max_message_bytes)
        self._writer: PeerIdentity | None = None
        self._watch: Watch | None = None
        self._read = 0
        self._told: tuple[int, int, int] = (0, 0, 0)
        self._wants_ready = self._leaving = self._proven = False
        self._heard = self._said = time.monotonic()
        self._suspected = self._dying = 0.0
        super().__init__(
            zmq.DEALER, f"reader rank {rank} of the queue at {contact}", context.heartbeat_timeout_s
        )
        try:
            self._connect(keys.writer.public, keys.reader(rank))
        except BaseException:
            self._let_go(0)
            raise
        self.start()

    def __repr__(self) -> str:
        return f"<RemoteReader of rank {self._rank} at {self._contact}>"

    def _connect(self, server: bytes, ours: Any) -> None:
        socket = self._socket
        with in_words(f"{self._contact} cannot be reached"):
            socket.curve_serverkey = server
            socket.curve_publickey, socket.curve_secretkey = ours.public, ours.secret
            socket.maxmsgsize = frames.MAX_TO_READER
            socket.reconnect_ivl = -1
            socket.ipv6 = ":" in self._contact.host
            socket.connect(self._contact.endpoint)
            who = attrs.asdict(this_process())
            self._say(frames.plain(Kind.JOIN, {"version": frames.VERSION, "who": who}))

    def join_queue(self, deadline: Deadline) -> None:
        """Return when the writer has taken this reader in. Raises as ``create_from_handle``."""
        with self._changed:
            while not self._joined:
                if self._error is not None:
                    raise self._its_error()
                if deadline.expired:
                    raise TimeoutError(
                        f"the writer at {self._contact} did not answer reader rank {self._rank} in time"
                    )
                self._changed.wait(deadline.remaining())

    # -- for the reader's thread ---------------------------------------------------------------

    @property
    def writer(self) -> str:
        return f"the writer ({self._writer} at {self._contact})"

    def poll(self) -> Message | None:
        if self._messages:
            return self._messages[0][0]
        error = self._error
        if error is not None and error[0] is not PeerGoneError:
            raise self._its_error()
        return None

    def receive(self, wait: Wait, check: Callable[[], None]) -> Message:
        self._until(lambda: bool(self._messages), wait, check)
        return self._messages[0][0]

    def advance(self) -> None:
        _, memory = self._messages.popleft()
        if memory is not None:
            self._assembly.recycle(memory)
        self._read += 1
        self.post()

    def wait_until_ready(self, wait: Wait, check: Callable[[], None]) -> None:
        check()
        self._wants_ready = True
        self.post()
        self._until(lambda: self._ready, wait, check)

    def _until(self, there: Callable[[], bool], wait: Wait, check: Callable[[], None]) -> None:
        check()  # before the lock: in a forked child nobody may ever give it back
        with self._changed:
            while not there():
                if self._error is not None:
                    raise self._its_error()
                self._changed.wait(wait.pause())
                check()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def leave(self, *, died: bool) -> None:
        if died:
            self.end(0)
        else:
            self._leaving = True
            self.post()
            self.join(SETTLE_S)  # or a process that ends now takes the goodbye with it

    def _its_error(self) -> KvplugError:
        assert self._error is not None
        kind, text = self._error
        return kind(text)

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        self._changed = threading.Condition()

    # -- the thread ----------------------------------------------------------------------------

    def _let_go(self, linger_ms: int) -> None:
        if self._watch is not None:
            self._watch.close()
        super()._let_go(linger_ms)
        self._fail(PeerGoneError, "this end has let go of its connection")

    def _failed(self, error: Exception) -> None:
        self._fail(TransportError, f"reader rank {self._rank} stops: {error}")

    def _fail(self, kind: type[KvplugError], text: str) -> None:
        """Nothing more comes. The first reason counts."""
        with self._changed:
            self._error = self._error or (kind, text)
            self._changed.notify_all()

    def _turn(self, now: float) -> float | None:
        self._hear(now)
        for event in list(self._connection_events()):
            self._see(event, now)
        if self._error is None:
            self._judge(now)
        if self._leaving:
            if self._error is None:
                self._say(frames.plain(Kind.LEAVE))
            self.end(SETTLE_S if self._error is None else 0)
            return 0.0
        if self._error is not None:
            return None
        if self._wants_ready:
            self._wants_ready = False
            self._say(frames.plain(Kind.READY))
        taken = self._assembly.frames, self._assembly.arrived, self._read
        if taken != self._told:
            self._told = taken
            self._say(frames.taken(*taken))
        if self._joined and now - self._said >= self._beat_s:
            self._say(frames.plain(Kind.BEAT))
        return self._pause()

    def _hear(self, now: float) -> None:
        for parts in self._received():
            if self._error is not None:
                continue
            self._heard, self._suspected = now, 0.0
            try:
                self._take(frames.read([part.buffer for part in parts]))
            except (WireError, TransportError) as e:
                kind = TransportError if isinstance(e, TransportError) else WireError
                self._fail(kind, f"reader rank {self._rank}, from {self.writer}: {e}")

    def _take(self, frame: frames.Frame) -> None:
        match frame:
            case First() | Piece():
                done = self._assembly.add(frame)
                if done is not None:
                    with self._changed:
                        self._messages.append(done)
                        self._changed.notify_all()
            case Plain(Kind.READY):
                with self._changed:
                    self._ready = True
                    self._changed.notify_all()
            case Plain(Kind.WELCOME, {"version": frames.VERSION, "who": who}):
                self._welcomed(identity_of(who))
            case Plain(Kind.REFUSED, str(why)):
                self._fail(ConfigError, why)
            case Over():
                self._over(frame)
            case Plain(Kind.BEAT):
                pass
            case _:
                raise WireError("it speaks another version; install the same kvplug-shm on both ends")

    def _welcomed(self, writer: PeerIdentity) -> None:
        self._writer = writer
        try:
            self._watch = observed(writer, self._has_ended)
        except PeerGoneError:
            self._has_ended()
        with self._changed:
            self._joined = True
            self._changed.notify_all()

    def _has_ended(self) -> None:
        """The writer's process has; what it said last may still be on its way. From any thread."""
        self._dying = time.monotonic()
        self.post()

    def _over(self, over: Over) -> None:
        lost = max(over.lost, over.total - self._assembly.arrived)
        if over.why:
            self._fail(
                TransportError,
                f"{self.writer} has evicted reader rank {self._rank} ({over.why}); of {over.total} messages"
                f" {lost} {'is' if lost == 1 else 'are'} lost to it, and all that come later",
            )
        elif lost:
            self._fail(
                TransportError,
                f"{self.writer} has closed before everything had been sent to reader rank {self._rank}: of"
                f" {over.total} messages {lost} {'is' if lost == 1 else 'are'} lost",
            )
        else:
            self._fail(PeerGoneError, f"{self.writer} has closed, and everything of it was received")

    def _see(self, event: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._proven = True
        elif event in _UNPROVEN:
            self._fail(
                AuthenticationError,
                f"the writer at {self._contact} and reader rank {self._rank} did not prove themselves to each"
                " other: the secrets differ (check KVPLUG_SECRET or secret_file on both ends), the handle is"
                " of an earlier run, or something else listens there",
            )
        elif event == zmq.EVENT_DISCONNECTED:
            self._hear(now)
            self._fail(PeerGoneError, self._how_it_ended())
        elif event == zmq.EVENT_CLOSED and not self._proven:
            self._fail(PeerGoneError, f"nobody listens at {self._contact}: the writer of this queue is gone")

    def _how_it_ended(self) -> str:
        if not self._joined:
            return f"the writer at {self._contact} hung up before reader rank {self._rank} had joined"
        how = "its process ended" if self._dying else "the connection ended"
        return (
            f"{self.writer} is gone: {how} after {self._assembly.arrived} messages had arrived at reader rank"
            f" {self._rank}; what it sent after them, if anything, is lost"
        )

    def _judge(self, now: float) -> None:
        if self._dying:
            if now - self._dying >= SETTLE_S:
                self._fail(PeerGoneError, self._how_it_ended())
        elif self._joined and self._watch is None and now - self._heard >= self._silence_s:
            # It may be us who were stopped: what came meanwhile gets a moment to be read.
            self._suspected = self._suspected or now
            if now - self._suspected >= self._beat_s / 2:
                self._fail(
                    PeerGoneError,
                    f"{self.writer} is silent for {now - self._heard:.1f} s, after {self._assembly.arrived}"
                    f" messages had arrived at reader rank {self._rank}",
                )

    def _say(self, frame: bytes) -> None:
        self._said = time.monotonic()
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # no connection any more, or one that takes nothing: either is told elsewhere
            pass

    def _pause(self) -> float | None:
        if not self._joined:
            return None
        moments = [self._said + self._beat_s]
        if self._dying or self._suspected:
            moments.append(time.monotonic() + self._beat_s / 10)
        if self._watch is None:
            moments.append(self._heard + self._silence_s)
        return max(0.0, min(moments) - time.monotonic())
