"""The writer's side of readers that share no memory with it.

Such a reader has words of its own in the ring, like a reader on this host; they are moved by its reports. So
the ring is the flow control: the writer waits for a slow remote reader as for any other, names it and its lag
in the same way, and nothing is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

import attrs

from kvplug import ClosedError, KvplugError, PeerGoneError
from kvplug.transport import BackgroundThread, Deadline, WireError
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_shm.queue.stream import LINGER_S, REPORT, Flag, FrameKind, Stream, header

logger = logging.getLogger(__name__)

ARRIVAL_S: Final = 1.0
"""How long the writer waits for a message to arrive at a reader that does not take its bytes."""
_READY_S: Final = 0.02
"""How often to check whether the readers on this host are ready, which they report in shared memory only."""
_MOST_REASON: Final = 500


@attrs.define(eq=False)
class Link:
    """A remote reader that is joining, or has joined."""

    rank: int
    stream: Stream
    changed: threading.Condition
    """There is something to send, or the link has ended."""
    is_joining: bool = True
    sender: BackgroundThread | None = None
    sent: int = 0
    """Messages whose sending has begun."""
    arrived: int = 0
    """Messages that it has reported as arrived."""
    answers: bool = True
    """False for a reader that has taken no bytes for too long, until it has caught up."""
    waits_for_ready: bool = False
    fault: str = ""


class RemoteReaders:
    """Each remote reader has two threads, one per direction, which sleep while there is nothing to do."""

    def __init__(self, reader_table: ReaderTable) -> None:
        self._reader_table = reader_table
        self._lock = threading.RLock()  # a signal handler may close the queue
        self._arrived = threading.Condition(self._lock)
        self._links: list[Link] = []
        self._closing = False

    # -- for the writer's thread ---------------------------------------------------------------

    def changed(self, deadline: Deadline) -> None:
        """A message was published, or the writer waits until all are ready.

        Returns when all messages have arrived at all remote readers that have joined, so that they outlive
        this process. A reader that takes no bytes is waited for at most :data:`ARRIVAL_S`, and not again
        until it has caught up. Also returns at the deadline: the messages are sent in any case.
        """
        if not self._links:
            return
        number = self._reader_table.published()
        moved, until = -1, 0.0
        with self._lock:
            for link in self._links:
                link.changed.notify()
            while late := [link for link in self._links if link.answers and link.arrived < number]:
                if self._closing or deadline.expired:
                    return
                now = time.monotonic()
                progress = sum(link.stream.num_sent_bytes + link.arrived for link in late)
                if progress != moved:
                    moved, until = progress, now + ARRIVAL_S
                elif now >= until:
                    for link in late:
                        link.answers = False
                left = deadline.remaining()
                self._arrived.wait(until - now if left is None else min(until - now, left))

    def close(self, deadline: Deadline) -> None:
        """Send the remaining messages and the end, and wait until the readers have received them, at most
        until the deadline. :meth:`abort` must follow."""
        number = self._reader_table.published()
        with self._lock:
            self._closing = True
            for link in self._links:
                link.changed.notify()
            while late := [link for link in self._links if link.arrived < number]:
                if deadline.expired:
                    logger.warning(
                        "a queue was closed before all its messages had arrived: %s",
                        ", ".join(f"{number - link.arrived} for reader rank {link.rank}" for link in late),
                    )
                    break
                self._arrived.wait(deadline.remaining())
            left = deadline.remaining()
            lingering = Deadline.after(LINGER_S if left is None else min(LINGER_S, left))
            while self._links and not lingering.expired:
                self._arrived.wait(lingering.remaining())

    def abort(self) -> None:
        """End all connections. Never waits. Idempotent."""
        self._closing = True
        for link in list(self._links):
            link.stream.hang_up()

    # -- the threads ---------------------------------------------------------------------------

    def prepare(self, rank: int, reader: JoiningPeer) -> Link:
        """Make what a reader that is joining needs here. :meth:`serve` or :meth:`cancel` must follow.

        Owns the reader's pidfd, also if it raises, and otherwise its connection.

        Raises:
            RuntimeError: this process can have no more threads. The connection is open.
        """
        table = self._reader_table
        stream = Stream(reader, lambda: header(FrameKind.ALIVE, table.published()))
        link = Link(rank, stream, threading.Condition(self._lock))
        link.sender = BackgroundThread(
            self._send, args=(link,), name=f"kvplug-shm-reader-{rank}", stop=stream.hang_up
        )
        try:
            link.sender.start()
        except BaseException:
            stream.close_pidfd()
            raise
        return link

    def serve(self, link: Link) -> None:
        """Serve a reader that has joined, until it is gone."""
        table, why, has_left = self._reader_table, "", False
        with self._lock:
            self._links.append(link)
            link.is_joining = False
            link.changed.notify()
        try:
            self._receive(link)
            has_left = True
        except WireError as e:
            why = f"it sent an invalid report: {e}"
        except KvplugError as e:
            why = link.fault or str(e)
        finally:
            is_closing = self._closing
            if not is_closing:
                reason = why.encode("utf-8", "replace")[:_MOST_REASON]
                link.stream.send_now(header(FrameKind.OVER, table.published(), False, len(reason)) + reason)
            # Only when the sender has ended may the writer use the memory again that it was sending from.
            self.cancel(link)
            if not is_closing:
                table.evict(link.rank, why, has_left=has_left)

    def cancel(self, link: Link) -> None:
        """The reader has not joined, or has ended."""
        link.stream.hang_up()
        with self._lock:
            if link in self._links:
                self._links.remove(link)
            link.is_joining = False
            link.changed.notify()
            self._arrived.notify_all()
        if link.sender is not None:
            link.sender.join()
        link.stream.close()

    def _receive(self, link: Link) -> None:
        """Take the reader's reports, until it leaves.

        Raises:
            PeerGoneError: it is gone.
            WireError: the bytes are not a report.
        """
        table, report = self._reader_table, bytearray(REPORT.size)
        while True:
            link.stream.receive(memoryview(report))
            flags, arrived, read = REPORT.unpack(report)
            if flags > Flag.READY | Flag.LEAVES or not read <= arrived <= link.sent:
                raise WireError(
                    f"its report has the flags {flags}, {arrived} messages as arrived and {read} as read,"
                    f" and {link.sent} were sent"
                )
            with self._lock:
                link.arrived = max(link.arrived, arrived)
                link.answers = link.answers or link.arrived == table.published()
                self._arrived.notify_all()
            table.release(link.rank, read)
            if flags & Flag.LEAVES:
                return
            if flags & Flag.READY:
                table.set_ready(table.index_of(link.rank))
                with self._lock:
                    link.waits_for_ready = True
                    link.changed.notify()

    def _send(self, link: Link) -> None:
        table, stream = self._reader_table, link.stream
        try:
            with self._lock:
                while link.is_joining:
                    link.changed.wait()
                if link not in self._links:
                    return
            stream.send(header(FrameKind.ALIVE, table.published()))  # what it must have to have joined
            while (kind := self._next_frame(link)) is not None:
                if kind is FrameKind.MESSAGE:
                    message = table.message(link.sent)
                    link.sent += 1
                    raw, head, body = message
                    first = header(kind, table.published(), raw, len(head), len(body))
                    stream.send(first, head, body)
                    del message, head, body  # do not keep the ring's memory
                    continue
                link.waits_for_ready = False
                stream.send(header(kind, link.sent))
                if kind is FrameKind.OVER:
                    return
        except (PeerGoneError, ClosedError):
            pass  # the receiving thread notices, too
        except Exception as e:
            logger.exception("sending to reader rank %d failed", link.rank)
            link.fault = f"a fault at the writer's end: {e}"
            stream.hang_up()

    def _next_frame(self, link: Link) -> FrameKind | None:
        """Wait until there is something to send. ``None`` when the link has ended."""
        table = self._reader_table
        with self._lock:
            while link in self._links:
                if link.sent < table.published():
                    return FrameKind.MESSAGE
                if link.waits_for_ready and table.all_ready():
                    return FrameKind.READY
                if self._closing:
                    return FrameKind.OVER
                link.changed.wait(_READY_S if link.waits_for_ready else None)
        return None
