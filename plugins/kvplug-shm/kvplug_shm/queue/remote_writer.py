"""The writer's network half: sends the ring's messages to remote readers, and releases what they have read.

A reader proves itself twice: at the front door (:mod:`kvplug_shm.queue.remote_door`), the only socket on the
network, and then to the ROUTER behind it, which knows the key of each rank (CURVE, see
:mod:`kvplug_shm.queue.remote_admission`) and parses no frame before that. A reader may have as many unread
messages as the ring has places, since its tail moves only on its reports; the bytes in flight to it are
bounded too. So nothing reaches the high-water mark, where ZeroMQ would drop it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import zmq

from kvplug import ClosedError, PeerGoneError
from kvplug.transport import Deadline, PeerIdentity, QueueEndpoint, WireError
from kvplug_shm.queue import remote_frames as frames
from kvplug_shm.queue.network import Feed
from kvplug_shm.queue.reader_link import BEATS, ReaderLink, identity_of
from kvplug_shm.queue.remote_admission import RemoteAdmission, descriptor_of, listen, rank_of
from kvplug_shm.queue.remote_contact import new_contact
from kvplug_shm.queue.remote_door import FrontDoor
from kvplug_shm.queue.remote_frames import Part, Plain, QueueFrameKind, Taken
from kvplug_shm.queue.remote_thread import SETTLE_S, SHORTEST_PATIENCE_S, SocketThread

logger = logging.getLogger(__name__)

ARRIVAL_S: Final = 1.0
"""How long the writer waits for a message to arrive at a reader that does not answer."""
_LOOK_S = 0.02  # what no event tells of: a dead process's last bytes, readers of the ring that are ready


class RemoteWriter(SocketThread):
    """Serves the remote readers of one queue."""

    def __init__(self, context: QueueEndpoint.Context, feed: Feed) -> None:
        self._feed = feed
        self._links: dict[bytes, ReaderLink] = {}  # by routing id; changed by the thread, with _moved held
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._closing: Deadline | None = None
        self._admission: RemoteAdmission | None = None
        self._door: FrontDoor | None = None
        super().__init__(zmq.ROUTER, f"the queue's end at {context.host}", context.heartbeat_timeout_s)
        try:
            self._door = door = FrontDoor(context.host, context.credentials)
            self._contact = new_contact(door.contact, context.credentials)
            keys = self._contact.keys(context.credentials)
            known = {rank: keys.reader(rank).raw_public for rank in feed.reader_ranks}
            self._admission = RemoteAdmission(self._context, known)  # before a reader can connect
            self._descriptors.add(self._admission.socket.getsockopt(zmq.FD))
            door.open(listen(self._socket, keys.writer))
        except BaseException:
            self._let_go(0)
            raise
        self._name = f"the queue's end at {self._contact}"
        self.start()

    def __repr__(self) -> str:
        return f"<RemoteWriter at {self._contact}>"

    @property
    def data(self) -> Mapping[str, Any]:
        return self._contact.as_plain()

    # -- for the writer's thread ---------------------------------------------------------------

    def changed(self, deadline: Deadline) -> None:
        """There is a message to send, or all may be ready.

        Returns when the message has arrived at all attached readers, so that it outlives this process. A
        reader that does not answer is waited for at most :data:`ARRIVAL_S`, and not again until it has caught
        up; never beyond the deadline.
        """
        if not self._links:
            return
        number = self._feed.published()
        self.post()
        moved, until = -1, 0.0
        with self._lock:
            while late := [link for link in self._links.values() if link.answers and link.arrived < number]:
                now = time.monotonic()
                progress = sum(link.progress for link in late)
                if progress != moved:
                    moved, until = progress, now + ARRIVAL_S
                elif now >= until:
                    for link in late:
                        link.answers = False
                if self._ended or deadline.expired:
                    return
                left = deadline.remaining()
                self._moved.wait(until - now if left is None else min(until - now, left))

    def close(self, deadline: Deadline) -> None:
        if not self._ended and self._closing is None:
            self._closing = deadline
            self.post()
        self.join(deadline.remaining())
        self.end(0)
        self.join(SETTLE_S)

    def abort(self) -> None:
        self.end(0)

    # -- the thread ----------------------------------------------------------------------------

    def _sockets(self) -> list[Any]:
        return super()._sockets() + ([] if self._admission is None else [self._admission.socket])

    def _failed(self, error: Exception) -> None:
        for link in list(self._links.values()):
            self._evict(link, f"a fault at the writer's end: {error}", died=True)

    def _let_go(self, linger_ms: int) -> None:
        for link in list(self._links.values()):
            link.close()
            link.frames = None  # do not keep the ring's memory alive
        until = time.monotonic() + linger_ms / 1000
        super()._let_go(linger_ms)
        if self._door is not None:
            self._door.close(max(0.0, until - time.monotonic()))
        with self._lock:
            self._moved.notify_all()

    def _turn(self, now: float) -> float | None:
        assert self._admission is not None
        self._admission.answer()
        self._receive_frames(now)
        ended = {fd for event, fd in list(self._connection_events()) if event == zmq.EVENT_DISCONNECTED}
        if ended:
            self._receive_frames(now)  # process its last frames before its end
        for link in self._links.values():
            if link.descriptor in ended:
                link.doubted = now  # the event may be of an earlier connection with that descriptor
        self._judge(now)
        self._send(now)
        if self._closing is not None and self._all_notified(self._closing, now):
            return 0.0
        return self._pause(now)

    def _receive_frames(self, now: float) -> None:
        for routing_id, *parts in self._received():
            link = self._links.get(routing_id.bytes)
            if link is None:
                self._meet(routing_id.bytes, parts, now)
                continue
            with self._concerning(link):
                link.received_at, link.suspected, link.beats = now, 0.0, 0
                self._take(link, frames.read([part.buffer for part in parts]))

    @contextlib.contextmanager
    def _concerning(self, link: ReaderLink) -> Iterator[None]:
        """An error of one reader evicts that reader, and does not affect the others."""
        try:
            yield
        except ClosedError:
            raise
        except WireError as e:
            self._evict(link, f"it sent nonsense: {e}", died=True)
        except Exception as e:
            if self._ended:
                raise
            logger.exception("%s loses reader rank %d: a fault of kvplug", self._name, link.rank)
            self._evict(link, f"a fault at the writer's end: {e}", died=True)

    def _meet(self, routing_id: bytes, parts: list[zmq.Frame], now: float) -> None:
        """A frame from a connection that has not joined yet."""
        try:
            frame = frames.read([part.buffer for part in parts])
            if isinstance(frame, Plain) and frame.kind is QueueFrameKind.JOIN:
                self._join(routing_id, parts[0], frame.value, now)
        except WireError as e:
            logger.warning("a reader that came to %s sent nonsense: %s", self._name, e)

    def _join(self, routing_id: bytes, frame: zmq.Frame, value: Any, now: float) -> None:
        match value:
            case {"version": frames.VERSION, "who": who, "patience_s": float(theirs)} if theirs > 0:
                patience_s = min(max(theirs, SHORTEST_PATIENCE_S), self._patience_s)
                link = ReaderLink(rank_of(frame), routing_id, identity_of(who), patience_s, now, now)
                link.descriptor = descriptor_of(frame)
            case _:
                raise WireError("it speaks another version; install the same kvplug-shm on both ends")
        why = self._feed.admit(link.rank, str(link.who))
        with self._lock:
            self._links[routing_id] = link
        if why:
            self._send_frame(link, [frames.plain(QueueFrameKind.REFUSED, why)], now)
            self._forget(link)
            return
        with self._concerning(link):
            self._welcome(link, now)

    def _welcome(self, link: ReaderLink, now: float) -> None:
        try:
            link.observe(lambda: self._has_ended(link))
        except PeerGoneError:
            self._has_ended(link)
        us = attrs.asdict(PeerIdentity.of_this_process())
        count = self._feed.published()
        welcome = {"version": frames.VERSION, "who": us, "patience_s": link.patience_s, "published": count}
        self._send_frame(link, [frames.plain(QueueFrameKind.WELCOME, welcome)], now)

    def _has_ended(self, link: ReaderLink) -> None:
        """The reader's process has ended; its last frames may still arrive. From any thread."""
        link.dying = time.monotonic()
        self.post()

    def _take(self, link: ReaderLink, frame: frames.Frame) -> None:
        match frame:
            case Taken():
                before = link.read
                with self._lock:
                    link.take(frame)
                    self._moved.notify_all()
                if link.read > before:
                    self._feed.release(link.rank, link.read)
            case Plain(QueueFrameKind.READY):
                link.wants_ready = True
                self._feed.ready(link.rank)
            case Plain(QueueFrameKind.LEAVE):
                self._evict(link, "has left", died=False)
            case Plain(QueueFrameKind.BEAT):
                pass
            case _:
                raise WireError(f"no reader sends a {type(frame).__name__}")

    def _judge(self, now: float) -> None:
        for link in list(self._links.values()):
            if link.dying and now - link.dying >= SETTLE_S:
                self._evict(link, "its process ended", died=True)
            elif link.dying:
                self._beat(link, now)
            elif link.doubted:
                # This fails if it was its connection.
                self._send_frame(link, [frames.plain(QueueFrameKind.BEAT)], now)
                if now - link.doubted >= SETTLE_S:
                    link.doubted = 0.0
            elif not link.watched and now - link.received_at >= link.patience_s:
                # This process may have been stopped: read first what arrived meanwhile.
                link.suspected = link.suspected or now
                if now - link.suspected >= link.beat_s / 2:
                    self._evict(link, f"silent for {now - link.received_at:.1f} s", died=True)

    def _send(self, now: float) -> None:
        published = self._feed.published()
        ready = any(link.wants_ready for link in self._links.values()) and self._feed.all_ready()
        for link in list(self._links.values()):
            with self._concerning(link):
                self._serve(link, published, ready, now)

    def _serve(self, link: ReaderLink, published: int, ready: bool, now: float) -> None:
        """Send one reader as much as it has room for; the rest is sent later."""
        if ready and link.wants_ready and self._send_frame(link, [frames.plain(QueueFrameKind.READY)], now):
            link.wants_ready = False
        while self._has(link) and link.has_room and link.sent < published:
            parts, last = link.next_frame(self._feed)
            if not self._send_frame(link, parts, now):
                break
            link.count(parts, last)
        if now - link.sent_at >= link.beat_s:
            self._beat(link, now)

    def _has(self, link: ReaderLink) -> bool:
        """Whether it still takes part, and was not evicted meanwhile."""
        return self._links.get(link.routing_id) is link

    def _beat(self, link: ReaderLink, now: float) -> None:
        """Send a heartbeat, unless it has not answered for long: then it is stopped, or gone."""
        link.sent_at = now
        if link.beats < BEATS:
            link.beats += 1
            self._send_frame(link, [frames.plain(QueueFrameKind.BEAT)], now)

    def _send_frame(self, link: ReaderLink, parts: list[Part], now: float) -> bool:
        """Send one frame; False if there is no room. Evicts a reader that cannot be reached."""
        if not self._has(link):
            return False
        link.sent_at = now
        try:
            self._put(link.routing_id, parts)
        except zmq.Again:  # frames of it lie before the mark: only one that reads nothing comes so far
            return False
        except zmq.ZMQError as e:
            if e.errno != errno.EHOSTUNREACH:
                raise
            self._evict(link, "its process ended" if link.dying else "its connection ended", died=True)
            return False
        return True

    def _put(self, routing_id: bytes, parts: list[Part]) -> None:
        last = len(parts) - 1
        self._socket.send(routing_id, zmq.SNDMORE | zmq.NOBLOCK)
        for at, part in enumerate(parts):
            more = zmq.SNDMORE if at < last else 0
            self._socket.send(part, more | zmq.NOBLOCK, copy=not isinstance(part, zmq.Frame))

    def _evict(self, link: ReaderLink, why: str, *, died: bool) -> None:
        if not self._has(link):
            return
        published = self._feed.published()
        self._feed.evict(link.rank, why, died=died)
        self._forget(link)
        last = frames.evicted(published, published - link.sent, why) if died else frames.goodbye(published)
        with contextlib.suppress(zmq.ZMQError):
            self._put(link.routing_id, [last])

    def _forget(self, link: ReaderLink) -> None:
        with self._lock:
            del self._links[link.routing_id]
            self._moved.notify_all()
        link.close()

    def _all_notified(self, deadline: Deadline, now: float) -> bool:
        """After everything has arrived, or at the deadline: announce the end to the readers, and end."""
        published = self._feed.published()
        links = list(self._links.values())
        if any(link.arrived < published for link in links) and not deadline.expired:
            return False
        for link in links:
            self._send_frame(link, [frames.goodbye(published)], now)
        left = deadline.remaining()
        self.end(SETTLE_S if left is None else max(_LOOK_S, min(SETTLE_S, left)))
        return True

    def _pause(self, now: float) -> float | None:
        """The next time at which something is due."""
        links = list(self._links.values())
        if not links:
            return None
        moments = [link.sent_at + link.beat_s for link in links]
        if any(link.restless for link in links):
            moments.append(now + _LOOK_S)
        moments.extend(link.received_at + link.patience_s for link in links if not link.watched)
        if self._closing is not None:
            moments.append(self._closing.at)
        return max(0.0, min(moments) - time.monotonic())
