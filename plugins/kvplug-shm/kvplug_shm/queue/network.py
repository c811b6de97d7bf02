"""The interfaces between a queue and its network half, which serves readers that memory does not reach.

A remote reader has words of its own in the writer's ring, like a reader on this host. In the writer's process
the *network half* acts for it: it reads messages in the ring, sends them, and releases them when the reader
reports that it has read them. So the ring is the flow control: the writer waits for a slow remote reader as
for any other, names it and its lag in the same way, and nothing is dropped.

In the reader's process the network is a :class:`Source`, as the ring is for readers on the writer's host.

The module :mod:`kvplug_shm.queue.remote` has both, in two functions that are imported when they are needed::

    serve(context: QueueEndpoint.Context, feed: Feed) -> NetworkHalf
    attach(context: QueueEndpoint.Context, data: Mapping[str, Any], rank: int, deadline: Deadline) -> Source
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from kvplug.transport import Deadline, MessageQueue


class QueueMessage(NamedTuple):
    """One message in the ring's memory, which is reused after the message was released."""

    raw: bool
    """Whether it is a chunk of bytes; otherwise it is a value."""
    head: bytes | memoryview
    """Of a value: the head, for :func:`kvplug.net.wire.decode_out_of_band`. Of a chunk: empty."""
    body: memoryview
    """Of a value: the memories of its tensors. Of a chunk: its bytes."""


class Feed(Protocol):
    """The writer's ring, for its network half. From any thread; no call waits."""

    @property
    def reader_ranks(self) -> tuple[int, ...]:
        """All readers of the handle."""

    def admit(self, rank: int, process: str) -> str:
        """Admit reader ``rank``, from message 0. Returns an empty text, or the reason for a refusal.

        The reader raises the reason as ``ConfigError``. ``process`` names it in messages, as ``str`` of a
        :class:`kvplug.transport.PeerIdentity` ("pid 12 on example").
        """

    def published(self) -> int:
        """The number of messages so far."""

    def message(self, number: int) -> QueueMessage:
        """Message ``number``, which was published and not released by the reader it is asked for.

        Raises:
            ClosedError: the writer was aborted; the network half must end.
        """

    def release(self, rank: int, count: int) -> None:
        """The reader has read ``count`` messages since the first; frees their room for the writer."""

    def ready(self, rank: int) -> None:
        """The reader waits until all are ready."""

    def all_ready(self) -> bool:
        """Whether the writer and all its live readers are ready.

        Readers on this host report it in shared memory, without a call: poll it while a reader waits for it.
        """

    def evict(self, rank: int, why: str, *, died: bool) -> None:
        """The reader is gone: it "has left", or it died. Later calls are ignored."""


class NetworkHalf(Protocol):
    """The writer's network half. It has its own thread, and registers itself for forks."""

    @property
    def data(self) -> Mapping[str, Any]:
        """Plain values for the handle, from which ``attach`` finds this end."""

    def changed(self, deadline: Deadline) -> None:
        """A message was published, or the writer waits until all are ready.

        Called in the writer's thread after each message; costs almost nothing without readers. Returns when
        the message has arrived at all attached readers, so that it outlives the writer. A reader that does
        not answer is waited for briefly, and not again until it has caught up. Also returns at the deadline:
        the message is published, and is sent in any case.
        """

    def close(self, deadline: Deadline) -> None:
        """Send all published messages to attached readers, announce the end, and release everything.

        Gives up at the deadline. Idempotent, like :meth:`abort`.
        """

    def abort(self) -> None:
        """Release everything at once. Never waits."""


class Source(Protocol):
    """The source of one reader's messages: the ring, or the network.

    One thread at a time receives; any thread may call ``wake`` and ``leave``. ``check`` raises when the end
    was closed: it is called before and after each wait.
    """

    @property
    def writer(self) -> str:
        """The writer's process, for messages: "the writer (pid 12)"."""

    def poll(self) -> QueueMessage | None:
        """The next message if it has arrived; it stays until :meth:`advance`. The fast path.

        Raises:
            TransportError, WireError: as :meth:`receive`.
        """

    def receive(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> QueueMessage:
        """The next message, which stays until :meth:`advance`.

        Raises:
            PeerGoneError: the writer has ended, and everything of it was received.
            TransportError: messages were lost; says how many.
            WireError: the received bytes are no message.
            TimeoutError, CancelledError: from ``wait.pause()``; and the errors of ``check``.
        """

    def advance(self) -> None:
        """Release the message. Its memory must not be read any more."""

    def wait_until_ready(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> None:
        """Return when the writer and all its readers have called this. Raises as :meth:`receive`."""

    def wake(self) -> None:
        """Make a waiting thread call ``check``. Never waits itself."""

    def leave(self, *, died: bool) -> None:
        """Leave: the writer no longer waits for this reader, which "has left", unless ``died``.

        Does not wait for the writer, and only briefly until its message has left this process.

        Idempotent. With ``died`` it may also be called after or during a call without, which it ends. The
        descriptors are closed when no thread is inside the other calls any more.
        """
