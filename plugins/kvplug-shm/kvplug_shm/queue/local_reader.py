"""The source of a reader that shares memory with the writer."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable

from kvplug import PeerGoneError, TransportError
from kvplug.transport import Connection, MessageQueue, Watch, WireError, close_after_fork
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.queue import join
from kvplug_shm.queue.ring_buffer import QueueMessage, ShmRingBuffer
from kvplug_shm.ring import protocol
from kvplug_shm.ring.ends import ReadingEnd, copy_for_one_of


class LocalSource:
    """The ring, and a watch on the writer. See :class:`~kvplug_shm.queue.reader.Source`."""

    def __init__(self, connection: Connection, ring: ShmRingBuffer, index: int, spin_s: float) -> None:
        """Takes ownership of the connection and the ring."""
        self._ring = ring
        self._index = index
        self._end = ReadingEnd(ring.words, index, ring.sizes.max_chunks)
        self._connection = connection
        self._spin_s = spin_s
        self._gone = ""
        self._watch: Watch | None = None
        self.copy = copy_for_one_of(ring.sizes.n_reader)
        close_after_fork(self)

    def join(self, writer: JoiningPeer) -> None:
        self._watch = writer.watch_from(lambda: join.confirm(writer), self._writer_gone)

    @property
    def writer(self) -> str:
        return f"the writer ({self._connection.peer})"

    def poll(self) -> QueueMessage | None:
        end = self._end
        if not end.available():
            return None
        try:
            return self._ring.get(end.read)
        except WireError:
            self.check_evicted()
            raise

    def receive(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> QueueMessage:
        end, spin_s = self._end, self._spin_s
        while True:
            check()
            self._check_writer()
            if end.poll(1, spin_s, wait.pause()):
                message = self.poll()
                if message is not None:
                    return message
            spin_s = 0.0

    def advance(self) -> None:
        self.check_evicted()
        self._end.release()

    def wait_until_ready(self, wait: MessageQueue.Wait, check: Callable[[], None]) -> None:
        words = self._ring.words
        own = self._ring.ready_word(self._index)
        words.store(own, 1)
        while True:
            check()
            gone = self._gone or protocol.is_over(words.load(protocol.HEAD))
            word = self._unready()
            self.check_evicted()
            if word is None:
                return
            if gone:
                raise PeerGoneError(f"{self.writer} has ended ({self._why()}) before all were ready")
            words.wait(word, 0, wait.pause())

    def check_evicted(self) -> None:
        end = self._end
        if end.evicted():
            lost = protocol.count_in(self._ring.words.load(protocol.HEAD)) - end.read
            raise TransportError(
                f"{self.writer} has evicted this reader, and at least {lost} messages are lost to it"
            )

    def wake(self) -> None:
        words = self._ring.words
        words.wake(protocol.HEAD)
        for end in (None, *range(self._ring.sizes.n_reader)):
            words.wake(self._ring.ready_word(end))

    def leave(self, *, died: bool) -> None:
        if not died:
            self._end.end()
        if self._watch is not None:
            self._watch.close()
        join.hang_up(self._connection)

    def drop(self) -> None:
        self._ring.close()

    def _after_fork_in_child(self) -> None:
        self._ring.close()

    def _writer_gone(self, reason: str) -> None:
        """Called in the watcher's thread. A live writer may have hung up on this reader only.

        A wake-up just before the reader sleeps is delayed by one sleep at most. The word of a writer that has
        ended changes, and then no sleep begins.
        """
        self._gone = reason
        with contextlib.suppress(ValueError):  # this end has left meanwhile, and the memory is released
            if self._writer_has_ended():
                self._end.evict_writer()
            self.wake()

    def _writer_has_ended(self) -> bool:
        """Whether the writer's process has ended, as far as this process can see."""
        try:
            pidfd = self._connection.peer.open_pidfd()
        except PeerGoneError:
            return True
        if pidfd is None:
            return False
        try:
            looking = select.poll()
            looking.register(pidfd, select.POLLIN)
            return bool(looking.poll(0))
        finally:
            os.close(pidfd)

    def _unready(self) -> int | None:
        """A word that must change before all are ready."""
        load = self._ring.words.load
        writer = self._ring.ready_word(None)
        if not load(writer):
            return writer
        for reader in range(self._ring.sizes.n_reader):
            over = protocol.is_over(load(protocol.tail(reader))) or load(protocol.evicted(reader))
            word = self._ring.ready_word(reader)
            if not over and not load(word):
                return word
        return None

    def _check_writer(self) -> None:
        """Raise if no more messages can arrive."""
        gone, over = self._gone, self._end.writer_over()
        if not gone and not over:
            return
        if self._end.available():
            return  # it arrived before the end
        self.check_evicted()
        raise PeerGoneError(f"{self.writer} has ended ({self._why()}), and everything of it was received")

    def _why(self) -> str:
        return self._gone or "it has left"
