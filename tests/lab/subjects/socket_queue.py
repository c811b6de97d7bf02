"""A message queue between processes, so that the suite has one to judge: copies, over a channel for each.

Both ends are those of the queue "memory". The writer's list is sent to each reader by a thread of its own; a
reader's end is a list of its own, filled by a thread, and what it takes is reported back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import attrs

from kvplug import ClosedError, ConfigError, KvplugError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Channel,
    Deadline,
    Listener,
    QueueHandle,
    Reader,
    Timeout,
    WireError,
    dial,
    peer_text,
)
from kvplug_testing.memory.queue import MemoryQueueEndpoint, MemoryReader, MemoryWriter, QueueMessage, Ring

PURPOSE = "socket queue"
HELLO_S = 5.0
MAX_BYTES = 15 << 20  # a channel's frame, less what surrounds the message


class SocketRing(Ring):
    """The writer's list, and the readers that it is sent to."""

    def __init__(self, reader_ranks: Sequence[int], max_chunks: int) -> None:
        super().__init__(reader_ranks, max_chunks)
        self.links: dict[int, Link] = {}
        self.closing = False

    def reader(self, rank: int) -> Reader:
        link = self.links.get(rank)
        process = str(link.channel.peer) if link is not None else "has not come yet"
        return self.gone.get(rank) or attrs.evolve(super().reader(rank), process=process)

    def unsent(self) -> list[int]:
        """Readers with bytes that the kernel has not accepted yet."""
        end = self.first + len(self.messages)
        return [rank for rank in self.here() if rank in self.links and self.links[rank].sent < end]


class SocketQueueEndpoint(MemoryQueueEndpoint):
    ring = SocketRing

    def create(self, reader_ranks: Sequence[int] | None = None) -> SocketWriter:
        ring = self.ring(self._reader_ranks(reader_ranks), self.context.max_chunks)
        return SocketWriter(self, ring)

    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> SocketReader:
        deadline = Deadline.after(timeout, self.context.timeout_s)
        handle.check("socket", rank)
        contact = str(handle.data["contact"])
        channel = Channel(dial(contact, self.context.credentials, PURPOSE, deadline.remaining()))
        try:
            channel.send(rank, deadline.remaining())
            refusal = channel.recv(deadline.remaining())
            if refusal != "":
                raise ConfigError(peer_text(refusal))
            return self.make_socket_reader(handle, rank, channel)
        except BaseException:
            channel.close()
            raise

    def make_socket_reader(self, handle: QueueHandle, rank: int, channel: Channel) -> SocketReader:
        return SocketReader(self, handle, rank, channel)

    def make_link(self, ring: SocketRing, rank: int, channel: Channel) -> Link:
        return Link(ring, rank, channel)


class Link:
    """The writer's connection to one reader: a thread that sends, and one that hears what was taken."""

    def __init__(self, ring: SocketRing, rank: int, channel: Channel) -> None:
        self.ring, self.rank, self.channel = ring, rank, channel
        self.sent = ring.first
        self.told_ready = False
        names = ((self.send, "sends"), (self.hear, "hears"))
        self.threads = [
            threading.Thread(target=target, name=f"socket queue {what}", daemon=True)
            for target, what in names
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def send(self) -> None:
        ring = self.ring
        with contextlib.suppress(KvplugError):
            while True:
                with ring.changed:
                    ring.changed.wait_for(
                        lambda: self.is_over() or self.due() or self.is_news() or ring.closing
                    )
                    if self.is_over():
                        return
                    news = self.is_news()
                    self.told_ready |= news
                    message = None if news else self.due()
                if news:
                    self.channel.send(("ready",), None)
                elif message is not None:
                    self.channel.send(("message", message.raw, bytes(message.data)), None)
                    with ring.changed:
                        self.sent += 1
                        ring.changed.notify_all()
                else:
                    self.channel.send(("left",), None)
                    return

    def is_over(self) -> bool:
        return self.channel.closed or self.rank in self.ring.gone

    def due(self) -> QueueMessage | None:
        at = self.sent - self.ring.first
        return self.ring.messages[at] if at < len(self.ring.messages) else None

    def is_news(self) -> bool:
        return not self.told_ready and None in self.ring.ready and not self.ring.unready()

    def hear(self) -> None:
        why, died = "its process ended, or hung up", True
        with contextlib.suppress(KvplugError):
            while True:
                match self.channel.recv(None):
                    case ("taken", int(taken)):
                        with self.ring.changed:
                            end = self.ring.first + len(self.ring.messages)
                            if not self.ring.taken[self.rank] < taken <= end:
                                raise WireError("it says that it has read what was not sent to it")
                            self.ring.taken[self.rank] = taken
                            self.ring.drop_what_all_have_read()
                    case ("ready",):
                        with self.ring.changed:
                            self.ring.ready.add(self.rank)
                            self.ring.changed.notify_all()
                    case ("left",):
                        why, died = "has left", False
                        break
        with self.ring.changed:
            if not self.channel.closed:
                self.ring.evict(self.rank, why, died)
        self.channel.close()

    def close(self) -> None:
        self.channel.close()
        with self.ring.changed:
            self.ring.changed.notify_all()
        for thread in self.threads:
            thread.join()


class SocketWriter(MemoryWriter):
    _ring: SocketRing
    _endpoint: SocketQueueEndpoint
    _forked = False

    def __init__(self, endpoint: SocketQueueEndpoint, ring: SocketRing) -> None:
        self._listener = Listener.open("unix:", endpoint.context.credentials, PURPOSE)
        super().__init__(endpoint, ring)
        self._accepting = threading.Thread(target=self._accept, name="socket queue accepts", daemon=True)
        self._accepting.start()

    def export_handle(self) -> QueueHandle:
        self._check_open()
        data = {"contact": self._listener.contact}
        return attrs.evolve(self._endpoint.handle_of(self._ring), transport="socket", data=data)

    def _accept(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                channel = Channel(self._listener.accept(None))
                try:
                    self._take_in(channel, channel.recv(HELLO_S))
                except KvplugError:
                    channel.close()

    def _take_in(self, channel: Channel, rank: Any) -> None:
        ring = self._ring
        with ring.changed:
            refusal = ""
            if rank not in ring.reader_ranks:
                refusal = f"rank {rank} is no reader of this queue"
            elif rank in ring.attached:
                refusal = f"{ring.reader(rank)} has attached already"
            channel.send(refusal, HELLO_S)
            if refusal or self._closed:
                channel.close()
                return
            ring.attached.add(rank)
            link = ring.links[rank] = self._endpoint.make_link(ring, rank, channel)
        link.start()

    def _put(self, message: QueueMessage) -> None:
        if len(message.data) > MAX_BYTES:
            raise WireError("larger than this queue carries")
        super()._put(message)
        with self._locked():
            # What was enqueued is to reach readers though this process be killed. A stopped reader of large
            # messages delays that; it is sent when it goes on.
            self._ring.changed.wait_for(lambda: self._closed or not self._ring.unsent(), 1.0)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        if self._forked:
            return
        deadline = Deadline.after(timeout, self._context.timeout_s)
        if not self._closed:
            with self._ring.changed:
                self._ring.changed.wait_for(lambda: not self._ring.unsent(), deadline.remaining())
        super().close()
        self._end_threads(deadline)

    def abort(self) -> None:
        if self._forked:
            return
        super().abort()
        self._end_threads(None)

    def _end_threads(self, polite: Deadline | None) -> None:
        self._listener.close()
        self._accepting.join()
        if polite is not None:
            with self._ring.changed:
                self._ring.closing = True
                self._ring.changed.notify_all()
            for link in self._ring.links.values():
                link.threads[0].join(polite.remaining())
        for link in self._ring.links.values():
            link.close()

    def _after_fork_in_child(self) -> None:
        self._closed = self._forked = True


class SocketReader(MemoryReader):
    _forked = False

    def __init__(
        self, endpoint: SocketQueueEndpoint, handle: QueueHandle, rank: int, channel: Channel
    ) -> None:
        super().__init__(endpoint, Ring([rank], endpoint.context.max_chunks), rank)
        self._handle, self._channel = handle, channel
        self._receiving = threading.Thread(target=self._receive, name="socket queue receives", daemon=True)
        self._receiving.start()

    def export_handle(self) -> QueueHandle:
        self._check_open()
        return self._handle

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        with contextlib.suppress(KvplugError):  # a writer that is gone is reported by the wait itself
            self._channel.send(("ready",), timeout)
        super().wait_until_ready(timeout)

    def _receive(self) -> None:
        ring, why = self._ring, "is gone"
        with contextlib.suppress(KvplugError):
            while True:
                match self._channel.recv(None):
                    case ("message", bool(raw), bytes(data)):
                        with ring.changed:
                            ring.put(QueueMessage(raw, data))
                    case ("ready",):
                        with ring.changed:
                            ring.ready.add(None)
                            ring.changed.notify_all()
                    case ("left",):
                        why = "has left"
                        break
        with ring.changed:
            ring.writer_gone = f"({self._channel.peer}) {why}"
            ring.changed.notify_all()

    def _advance(self) -> None:
        super()._advance()
        with contextlib.suppress(KvplugError):  # a writer that is gone needs no report
            self._channel.send(("taken", self._ring.taken[self._rank]), None)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        if self._forked:
            return
        was_closed = self._closed
        super().close(timeout)  # first: the writer hangs up when it hears of it
        if not was_closed:
            with contextlib.suppress(KvplugError):
                self._channel.send(("left",), timeout)
        self._end_thread()

    def abort(self) -> None:
        if self._forked:
            return
        super().abort()
        self._end_thread()

    def _end_thread(self) -> None:
        self._channel.close()
        self._receiving.join()

    def _leave(self, why: str, died: bool) -> None:
        """The writer's end says so; no other end has this list."""

    def _after_fork_in_child(self) -> None:
        self._closed = self._forked = True
