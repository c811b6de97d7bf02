"""A reader's end of the queue "shm", for every source of messages."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from kvplug import UnsupportedError
from kvplug.net.wire import Limits, decode, decode_out_of_band
from kvplug.net.wire.copying import CopyBytes
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    MessageLimit,
    MessageQueue,
    NamedExhaustion,
    QueueEndpoint,
    Timeout,
)
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.memory.pool import Pool
from kvplug_shm.queue.ends import ShmEnd
from kvplug_shm.queue.ring_buffer import QueueMessage

_DEQUEUEING: Final = NamedExhaustion("dequeueing a value")
_LARGE: Final = 16 << 20
"""Bytes of a message that may be more than this process can have."""


class Source(Protocol):
    """The source of one reader's messages: the ring, or a connection to the writer.

    One thread at a time receives; any thread may call ``wake`` and ``leave``. ``check`` raises when the end
    was closed: it is called before and after each wait.
    """

    @property
    def writer(self) -> str:
        """The writer's process, for messages: "the writer (pid 12)"."""

    @property
    def copy(self) -> CopyBytes:
        """Copies a tensor's bytes out of a message."""

    def join(self, writer: JoiningPeer) -> None:
        """Make the last step of the join. If it fails, :meth:`leave` must follow.

        Raises:
            TimeoutError, PeerGoneError, TransportError, WireError, CapacityError: it failed.
            ResourceExhaustedError: one of the two processes lacks a resource.
        """

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

    def check_evicted(self) -> None:
        """Raises TransportError if the current message may have been overwritten."""

    def advance(self) -> None:
        """Release the message. Its memory must not be read any more."""

    def wait_until_ready(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> None:
        """Return when the writer and all its readers have called this. Raises as :meth:`receive`."""

    def wake(self) -> None:
        """Make a waiting thread call ``check``. Never waits itself."""

    def leave(self, *, died: bool) -> None:
        """Leave: the writer no longer waits for this reader, which "has left", unless ``died``.

        Waits only briefly, until the writer has noticed. Idempotent. With ``died`` it never waits, and may
        also be called after or during a call without, which it ends.
        """

    def drop(self) -> None:
        """After :meth:`leave`, when no thread is inside any more: release the memory."""


class ShmReader(ShmEnd):
    """Copies values out of the source's memory; chunks are read in place."""

    def __init__(
        self,
        context: QueueEndpoint.Context,
        handle: QueueEndpoint.Handle,
        rank: int,
        source: Source,
        max_message_bytes: int,
        pool: Pool,
    ) -> None:
        """Takes ownership of ``source`` and ``pool``."""

        def let_go() -> None:
            source.drop()
            pool.close()

        super().__init__(context, handle, rank, let_go)
        self._source = source
        self._limits = Limits(max_bytes=max_message_bytes)  # the size of the mapping bounds it, too
        self._pool = pool

    @property
    def readers(self) -> tuple[MessageQueue.ReaderState, ...]:
        self._check_writer()
        return ()

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        source = self._source
        with self._use_guard:
            peers = f"{source.writer} or another reader"
            wait = self._wait("all to be ready", lambda: peers, self._deadline(timeout))
            source.wait_until_ready(wait, self._use_guard.check)

    def dequeue(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Any:
        with self._use_guard, _DEQUEUEING:
            _, head, body = self._next(False, timeout, cancel, indefinite)
            try:
                nbytes = len(head) + body.nbytes
                if nbytes > _LARGE:
                    # Memory that its writer has not used takes no room, and may be larger than all there is.
                    MessageLimit().check_size(
                        nbytes, f"the next message of {self._source.writer} remains unreceived, since it"
                    )
                if body.nbytes:
                    value = decode_out_of_band(
                        head, body, limits=self._limits, make=self._pool.tensor, copy=self._source.copy
                    )
                else:
                    value = decode(head, limits=self._limits)
            except Exception as e:
                traceback.clear_frames(e.__traceback__)
                self._use_guard.check()
                self._source.check_evicted()
                raise
            finally:
                # Views of the memory. The guard may release it, and an exception keeps its frames' locals.
                del head, body
            self._use_guard.check()  # if it was aborted, the writer may have used the memory again
            self._source.advance()
            return value

    @contextmanager
    def acquire_read(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Iterator[memoryview]:
        """A chunk in the ring. A tensor made over it (``torch.frombuffer``) does not keep the memory mapped:
        drop it before the block ends. Later it shows other messages, and after :meth:`close` it is a crash.

        Raises:
            UnsupportedError: the next message is a value. And what :meth:`dequeue` raises.
        """
        with self._use_guard:
            # The only view of the memory that is left: within the block this end may be closed.
            view = self._next(True, timeout, cancel, indefinite).body.toreadonly()
            try:
                with view:
                    yield view
            finally:
                if not self.closed:
                    self._source.advance()

    def _next(
        self, raw: bool, timeout: Timeout, cancel: threading.Event | None, indefinite: bool
    ) -> QueueMessage:
        """Wait for the next message, and leave it where it is."""
        timeout = None if indefinite and timeout is DEFAULT_TIMEOUT else timeout
        deadline = self._deadline(timeout)
        source = self._source
        message = source.poll()
        if message is None:
            wait = self._wait(
                "a message", lambda: source.writer, deadline, cancel=cancel, indefinite=indefinite
            )
            message = source.receive(wait, self._use_guard.check)
        if message.raw is not raw:
            self._source.check_evicted()
            del message  # an exception keeps its frames' locals alive, and this one is memory
            kinds = ("a chunk of bytes, for acquire_read", "a value, for dequeue")
            raise UnsupportedError(f"the next message is {kinds[raw]}")
        return message

    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._check_writer()

    def acquire_write(self, nbytes: int | None = None, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        self._check_writer()

    def _wake(self) -> None:
        self._source.wake()

    def _announce_end(self, deadline: Deadline) -> None:
        self._source.leave(died=False)

    def _end(self) -> None:
        self._source.leave(died=True)
