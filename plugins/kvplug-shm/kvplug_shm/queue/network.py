"""How readers that memory does not reach take part: what the queue asks of a network, and what it offers it.

A reader elsewhere has words of its own in the writer's ring, as one on this host has. In the writer's process
its *network half* stands in for it: it takes messages out of the ring where they lie, sends them, and
releases them when the reader says that it has taken them. So the ring is the credit: the writer waits for
a slow reader elsewhere as for any other, names it and its lag alike, and nothing is dropped.

In the reader's process the network is a :class:`Source`, as the ring is for readers on the writer's host.

The module :mod:`kvplug_shm.queue.remote` has both, in two functions that are imported when they are needed::

    serve(context: QueueContext, feed: Feed) -> NetworkHalf
    attach(context: QueueContext, data: Mapping[str, Any], rank: int, deadline: Deadline) -> Source
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from kvplug.transport import Deadline, Wait


class QueueMessage(NamedTuple):
    """One message, where it lies. Its memory is the next message's once it was released."""

    raw: bool
    """A chunk of bytes; otherwise a value."""
    head: bytes | memoryview
    """Of a value: what :func:`kvplug.net.wire.decode_out_of_band` takes first. Of a chunk: nothing."""
    body: memoryview
    """Of a value: the memories that it takes second. Of a chunk: its bytes."""


class Feed(Protocol):
    """The writer's ring as its network half sees it. From any thread; nothing here waits."""

    @property
    def reader_ranks(self) -> tuple[int, ...]:
        """Everyone named in the handle."""

    def admit(self, rank: int, process: str) -> str:
        """Reader ``rank`` takes part from now on, from message 0. Empty, or a sentence why it does not.

        The sentence is what the reader raises as ``ConfigError``. ``process`` is what messages call it, as
        ``str`` of a :class:`kvplug.transport.PeerIdentity` ("pid 12 on example").
        """

    def published(self) -> int:
        """How many messages there are, from the first one on."""

    def message(self, number: int) -> QueueMessage:
        """Message ``number``, which was published and not released by the reader it is asked for.

        Raises:
            ClosedError: the writer was aborted, and its network half is to let go.
        """

    def release(self, rank: int, count: int) -> None:
        """The reader is done with ``count`` messages since the first; it makes room for the writer."""

    def ready(self, rank: int) -> None:
        """The reader waits until all are ready."""

    def all_ready(self) -> bool:
        """Whether the writer and all its readers that live have waited for it.

        Readers in shared memory say so there, which calls nothing: look again now and then while a reader
        waits for it.
        """

    def evict(self, rank: int, why: str, *, died: bool) -> None:
        """The reader takes part no more: it "has left", or it died. Once; what follows is ignored."""


class NetworkHalf(Protocol):
    """The writer's network half. It has its own thread, and registers itself for forks."""

    @property
    def data(self) -> Mapping[str, Any]:
        """For the handle: plain values, from which ``attach`` finds this end."""

    def changed(self, deadline: Deadline) -> None:
        """A message was published, or the writer waits until all are ready.

        From the writer's thread, after each; costs next to nothing where no reader has come. Returns when the
        message has arrived at those that have come, so that it outlives the writer; a reader from which
        nothing comes is waited for a moment, and not again until it has caught up. Returns at the deadline
        as well: the message is published, and is sent whatever happens here.
        """

    def close(self, deadline: Deadline) -> None:
        """Send what was published to the readers that have come, tell them of the end, and let go.

        Gives up at the deadline. Idempotent, as :meth:`abort` is.
        """

    def abort(self) -> None:
        """Let go at once. Never waits."""


class Source(Protocol):
    """Where one reader's messages come from: the ring, or the network.

    One thread at a time receives; ``wake`` and ``leave`` come from any. ``check`` raises when the end was
    closed: it is called before each wait, and after each.
    """

    @property
    def writer(self) -> str:
        """The writer's process, for messages: "the writer (pid 12)"."""

    def poll(self) -> QueueMessage | None:
        """The next message if it is here, which stays until :meth:`advance`. Costs as little as it can.

        Raises:
            TransportError, WireError: as :meth:`receive`.
        """

    def receive(self, wait: Wait, check: Callable[[], None]) -> QueueMessage:
        """The next message, which stays until :meth:`advance`.

        Raises:
            PeerGoneError: the writer has ended, and everything of it was received.
            TransportError: messages were lost; says how many.
            WireError: what came is no message.
            TimeoutError, CancelledError: as ``wait.pause()`` says. And what ``check`` raises.
        """

    def advance(self) -> None:
        """The message is done with. Its memory is not looked at any more."""

    def wait_until_ready(self, wait: Wait, check: Callable[[], None]) -> None:
        """Return when the writer and all its readers have asked for this. Raises as :meth:`receive`."""

    def wake(self) -> None:
        """A thread that waits calls ``check``. Never waits itself."""

    def leave(self, *, died: bool) -> None:
        """The writer waits for this reader no more; it "has left", unless ``died``.

        Does not wait for the writer, and for a moment at most until what it says has left this process.

        Idempotent with ``died``, which may also come after the other or during it, and ends it. The
        descriptors are closed when no thread is inside the other calls any more.
        """
