"""The source of a reader that shares no memory with the writer.

Its thread receives messages into memory of this process, independently of the reader, and reports their
arrival to the writer; the reader's thread reports how many it has read, which frees the writer's room. A
broken connection is never restored: messages in flight are lost, and the reader gets an error that says so.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvplug import KvplugError, PeerGoneError, ResourceExhaustedError, TimeoutError, TransportError
from kvplug.net.wire.copying import copy_bytes
from kvplug.net.wire.tensors import TensorMeta, memory_of_writable
from kvplug.transport import (
    BackgroundThread,
    MessageLimit,
    MessageQueue,
    WireError,
    peer_text,
)
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.memory.pool import POOLED_FROM, Pool
from kvplug_shm.queue import join
from kvplug_shm.queue.ring_buffer import QueueMessage
from kvplug_shm.queue.stream import HEADER, LINGER_S, REPORT, Flag, FrameKind, Stream

logger = logging.getLogger(__name__)

_MOST_REASON: Final = 1000


class RemoteSource:
    """See :class:`~kvplug_shm.queue.reader.Source`."""

    def __init__(
        self,
        writer: JoiningPeer,
        *,
        rank: int,
        max_message_bytes: int,
        max_unread: int,
        pool: Pool,
    ) -> None:
        """Takes ownership of the writer's connection and pidfd, also if it raises.

        ``max_unread``: the most messages that the writer has room for.

        Raises:
            RuntimeError: this process can have no more threads.
        """
        self._rank = rank
        self._most = max_message_bytes + max_message_bytes // 64 + POOLED_FROM  # memories are aligned
        self._max_unread = max_unread
        self._pool = pool
        connection = writer.connection
        self.writer = f"the writer ({connection.peer} at {connection.address})"
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._messages: deque[QueueMessage] = deque()
        self._end: Callable[[], KvplugError] | None = None
        self._awaited: int | None = None
        """How many messages there were at the join."""
        self._published = self._arrived = self._read = 0
        self._arrived_bytes = self._read_bytes = 0
        self._all_ready = False
        self._stream = Stream(writer, self._report_of)
        self._has_joined = threading.Event()
        self._thread = BackgroundThread(
            self._run, name=f"kvplug-shm-reader-{rank}", stop=partial(self.leave, died=True)
        )
        try:
            self._thread.start()
        except BaseException:
            self._stream.close()
            raise

    def join(self, writer: JoiningPeer) -> None:
        """Returns when everything that was enqueued before the join is here: else it is lost if the writer
        dies. Raises as :meth:`Source.join`."""
        join.confirm(writer)
        self._has_joined.set()
        deadline = writer.deadline
        with self._lock:
            while self._awaited is None or self._arrived < self._awaited:
                self._check_end()
                if deadline.expired:
                    raise TimeoutError(
                        f"{self.writer} did not send reader rank {self._rank} in time what it had enqueued"
                        " before the join"
                    )
                self._changed.wait(deadline.remaining())

    # -- for the reader's thread ---------------------------------------------------------------

    def poll(self) -> QueueMessage | None:
        return self._messages[0] if self._messages else None

    def receive(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> QueueMessage:
        self._wait_until(lambda: self._messages, wait, check)
        return self._messages[0]

    def advance(self) -> None:
        self._read_bytes += _nbytes(self._messages.popleft())
        self._read += 1
        self._report()

    def wait_until_ready(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> None:
        check()
        self._report(Flag.READY)
        self._wait_until(lambda: self._all_ready, wait, check)

    def check_evicted(self) -> None:
        """A message from the network is in this process's own memory."""

    copy = staticmethod(copy_bytes)

    def wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def leave(self, *, died: bool) -> None:
        if not died:
            self._report(Flag.LEAVES)
            self._thread.join(LINGER_S)  # the writer hangs up; closing with unread bytes could discard it
        self._stream.hang_up()
        self._has_joined.set()

    def drop(self) -> None:
        """Nothing: the messages are in the pool's memory."""

    def _wait_until(
        self, is_so: Callable[[], Any], wait: MessageQueue.Wait, check: Callable[[], None]
    ) -> None:
        check()  # before the lock: a closed end must not wait for it
        with self._lock:
            while not is_so():
                self._check_end()
                self._changed.wait(wait.pause())
                check()

    def _check_end(self) -> None:
        if self._end is not None:
            raise self._end()

    def _report_of(self, flags: int = 0) -> bytes:
        read = self._read  # first: it is at most what has arrived
        return REPORT.pack(flags, self._arrived, read)

    def _report(self, flags: int = 0) -> None:
        try:
            self._stream.send(self._report_of(flags))
        except PeerGoneError:
            pass  # the receiving thread notices, too

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        end: Callable[[], KvplugError]
        self._has_joined.wait()
        try:
            while (over := self._receive_frame()) is None:
                pass
            end = over
        except PeerGoneError as e:
            end = partial(self._gone, str(e))
        except ResourceExhaustedError as e:
            end = partial(ResourceExhaustedError, self._in_words(e), resource=e.resource)
        except KvplugError as e:
            end = partial(type(e), self._in_words(e))
        except Exception as e:
            logger.exception("receiving as reader rank %d failed", self._rank)
            end = partial(TransportError, self._in_words(e))
        with self._lock:
            self._end = end
            self._changed.notify_all()
        self._stream.close()

    def _receive_frame(self) -> Callable[[], KvplugError] | None:
        """Receive a frame. Returns the error of the end if it was the last one.

        Raises:
            PeerGoneError: the writer is gone.
            WireError: the bytes are not a frame, or the message is larger than allowed.
            CapacityError, ResourceExhaustedError: there is no memory for the message.
        """
        data = bytearray(HEADER.size)
        self._stream.receive(memoryview(data))
        kind, raw, self._published, head_nbytes, body_nbytes = HEADER.unpack(data)
        match kind:
            case FrameKind.MESSAGE:
                self._receive_message(bool(raw), head_nbytes, body_nbytes)
            case FrameKind.OVER if head_nbytes <= _MOST_REASON:
                reason = bytearray(head_nbytes)
                self._stream.receive(memoryview(reason))
                return partial(self._over, peer_text(reason.decode("utf-8", "replace")))
            case FrameKind.READY | FrameKind.ALIVE:
                with self._lock:
                    self._all_ready |= kind == FrameKind.READY
                    if self._awaited is None:
                        self._awaited = self._published
                    self._changed.notify_all()
            case _:
                raise WireError(f"a frame of kind {kind} with {head_nbytes} bytes does not belong to a queue")
        return None

    def _receive_message(self, raw: bool, head_nbytes: int, body_nbytes: int) -> None:
        nbytes = head_nbytes + body_nbytes
        if len(self._messages) >= self._max_unread or self._published <= self._arrived:
            raise WireError(
                f"message {self._arrived + 1} of {self._published} was announced while {len(self._messages)}"
                f" were unread; the queue has room for {self._max_unread}"
            )
        if nbytes > self._most:
            raise WireError(f"a message of {nbytes} bytes was announced; at most {self._most} are accepted")
        MessageLimit().check_size(
            self._arrived_bytes - self._read_bytes + nbytes,
            "the total of the unread messages and the next one",
        )
        if nbytes < POOLED_FROM:
            memory = memoryview(bytearray(nbytes))
        else:
            memory = memory_of_writable(self._pool.tensor(TensorMeta("uint8", (nbytes,))))
        self._stream.receive(memory)
        whole = memory.toreadonly()
        with self._lock:
            self._messages.append(QueueMessage(raw, whole[:head_nbytes], whole[head_nbytes:]))
            self._arrived_bytes += nbytes
            self._arrived += 1
            self._changed.notify_all()
        self._report()

    def _over(self, reason: str) -> KvplugError:
        lost = self._published - self._arrived
        losses = f"{lost} of {self._published} messages are lost to reader rank {self._rank}"
        if reason:
            return TransportError(
                f"{self.writer} has evicted this reader ({reason}): {losses}, and all that come later"
            )
        if lost:
            return TransportError(f"{self.writer} has closed without sending everything: {losses}")
        return PeerGoneError(f"{self.writer} has closed, and everything of it was received")

    def _gone(self, how: str) -> KvplugError:
        lost = self._published - self._arrived
        after = f"({how}) after {self._arrived} messages had arrived at reader rank {self._rank}"
        if lost:
            return TransportError(
                f"{self.writer} is gone, or has evicted this reader {after};"
                f" at least {lost} after them are lost"
            )
        return PeerGoneError(f"{self.writer} is gone {after}; what it sent after them, if anything, is lost")

    def _in_words(self, error: Exception) -> str:
        return f"reader rank {self._rank}, from {self.writer}: {error}"


def _nbytes(message: QueueMessage) -> int:
    return len(message.head) + len(message.body)
