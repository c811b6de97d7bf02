"""The writer's end of the queue "shm"."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvplug import CapacityError, PeerGoneError
from kvplug.net.wire import Limits, aligned, encode_out_of_band
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, MessageQueue, NamedExhaustion, QueueEndpoint, Timeout
from kvplug_shm.memory.copying import RELEASE_GIL_BYTES, into
from kvplug_shm.options import ShmQueueOptions
from kvplug_shm.queue.admission import Admission
from kvplug_shm.queue.ends import ShmEnd
from kvplug_shm.queue.extents import Arena
from kvplug_shm.queue.reader_table import ReaderTable, listed
from kvplug_shm.queue.ring_buffer import CHUNK, VALUE, ShmRingBuffer
from kvplug_shm.ring import protocol
from kvplug_shm.ring.ends import WritingEnd

_ANY_SIZE: Final = Limits(max_bytes=1 << 62)
_NEAR_FROM_BYTES: Final = 1 << 20
_NEAR_BYTES: Final = 16 << 20
"""Unread bytes of large messages that the writer goes ahead of its readers. Measured with four readers of
messages of 16 MiB on two processors: 4 MiB are slower, and so are all places."""
_SLOW_BYTES_PER_S: Final = 1e9
"""A reader that takes longer for a message does something else."""
_ENQUEUEING: Final = NamedExhaustion("enqueueing a value")


class ShmWriter(ShmEnd):
    """Copies each message once, into the ring, from which all readers read it.

    Threads: one that admits readers, a short-lived one for each that joins, and two for each remote reader.
    The process's liveness watcher watches the others.
    """

    def __init__(
        self,
        context: QueueEndpoint.Context,
        options: ShmQueueOptions,
        handle: QueueEndpoint.Handle,
        *,
        ring: ShmRingBuffer,
        end: WritingEnd,
        reader_table: ReaderTable,
        admission: Admission,
    ) -> None:
        """Takes ownership of its arguments."""
        super().__init__(context, handle, None, self._drop)
        sizes = ring.sizes
        self._ring = ring
        self._writing = end
        self._reader_table = reader_table
        self._admission = admission
        self._remote_readers = admission.remote_readers
        self._places = sizes.max_chunks
        self._arena = Arena(sizes.max_chunks, sizes.chunk_nbytes, sizes.large_nbytes)
        self._most = sizes.max_message_bytes
        self._keep_nbytes = options.keep_bytes
        self._spin_s = options.spin_us * 1e-6
        self._does_not_read: tuple[int, int] | None = None
        """The word of a reader that did not change while this end waited for it, and its value."""

    @property
    def readers(self) -> tuple[MessageQueue.ReaderState, ...]:
        self._use_guard.check()
        return self._reader_table.readers()

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        reader_table, words = self._reader_table, self._ring.words
        with self._use_guard:
            deadline = self._deadline(timeout)
            wait = self._wait("all to be ready", lambda: listed(reader_table.unready()), deadline)
            reader_table.set_ready(None)
            self._remote_readers.changed(deadline)
            while unready := reader_table.unready():
                self._use_guard.check()
                word = self._ring.ready_word(reader_table.index_of(unready[0].rank))
                words.wait(word, 0, wait.pause())
            self._use_guard.check()

    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        with self._use_guard, _ENQUEUEING:
            head, memories = encode_out_of_band(value, limits=_ANY_SIZE)
            head_nbytes = len(head)
            body_at = aligned(head_nbytes)
            nbytes = body_at
            for memory in memories:
                nbytes += aligned(memory.nbytes)
            if nbytes > self._most:
                self._check_size(head_nbytes + sum(memory.nbytes for memory in memories))
            deadline = self._deadline(timeout)
            at = self._place(nbytes, deadline)
            arena = self._ring.arena
            if head_nbytes < RELEASE_GIL_BYTES:
                arena[at : at + head_nbytes] = head
            else:
                into(arena, at, memoryview(head))
            memory_at = at + body_at
            for memory in memories:
                into(arena, memory_at, memory)
                memory_at += aligned(memory.nbytes)
            self._publish(VALUE, at, head_nbytes, nbytes - body_at, nbytes, deadline)

    def _check_size(self, nbytes: int) -> None:
        if nbytes > self._most:
            raise CapacityError(
                f"the value takes {nbytes} bytes, and the queue's option max_message_bytes is {self._most}"
            )

    @contextmanager
    def acquire_write(
        self, nbytes: int | None = None, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Iterator[memoryview]:
        """A chunk in the ring. A tensor made over it (``torch.frombuffer``) does not keep the memory mapped:
        drop it before the block ends. Later it is part of other messages, and after :meth:`close` a crash.

        Raises:
            CapacityError: ``nbytes`` do not fit a chunk. And what :meth:`enqueue` raises.
        """
        most = self._ring.sizes.max_chunk_bytes
        nbytes = most if nbytes is None else nbytes
        if not 0 <= nbytes <= most:
            raise CapacityError(f"{nbytes} bytes were asked for, and a chunk has {most}")
        with self._use_guard:
            taken = aligned(nbytes or 1)
            deadline = self._deadline(timeout)
            at = self._place(taken, deadline)
            with self._ring.arena[at : at + nbytes] as view:
                yield view
            self._publish(CHUNK, at, 0, nbytes, taken, deadline)

    def _publish(
        self, kind: int, at: int, head_nbytes: int, body_nbytes: int, nbytes: int, deadline: Deadline
    ) -> None:
        """Publish the message at the place from :meth:`_place` to the readers."""
        self._use_guard.check()
        number = self._writing.sent
        self._ring.put(number, kind, at, head_nbytes, body_nbytes)
        self._arena.hold(number, at, nbytes)
        self._writing.publish()
        self._remote_readers.changed(deadline)

    def _place(self, nbytes: int, deadline: Deadline) -> int:
        """Wait for the place for a message of ``nbytes``. Readers do not read it before it is published."""
        if self._reader_table.all_left:
            raise PeerGoneError(f"no reader is left: {listed(self._reader_table.readers())}")
        if nbytes >= _NEAR_FROM_BYTES:
            self._wait_for_slow_readers(nbytes, deadline)
        at = self._find(nbytes, self._writing.room())
        return self._wait_for_place(nbytes, deadline) if at is None else at

    def _wait_for_slow_readers(self, nbytes: int, deadline: Deadline) -> None:
        """Wait until few large messages are unread, as long as each reader continues to read.

        A writer that runs ahead fills memory that has left the caches before it is read; and where processes
        share processors, it takes them from the readers. For a reader that did not continue, the writer waits
        again only when that reader has moved.
        """
        end, patience_s = self._writing, nbytes / _SLOW_BYTES_PER_S
        num_unread = max(1, _NEAR_BYTES // nbytes)
        if num_unread >= self._places:
            return
        room = self._places - num_unread
        while (awaited := end.blocked_on(room)) is not None:
            left_s = deadline.remaining()
            if awaited == self._does_not_read or left_s == 0:
                return
            end.poll(room, nap_s=patience_s if left_s is None else min(patience_s, left_s))
            self._use_guard.check()
            if end.blocked_on(room) == awaited:
                self._does_not_read = awaited
                return

    def _find(self, nbytes: int, room: int) -> int | None:
        """The same without waiting: ``None`` if there is no place."""
        if not room:
            return None
        arena = self._arena
        arena.release(self._writing.sent - self._places + room)
        spare = arena.spare(self._keep_nbytes, nbytes)
        if spare is not None:
            self._ring.give_back(*spare)
        return arena.find(nbytes)

    def _wait_for_place(self, nbytes: int, deadline: Deadline) -> int:
        end, reader_table = self._writing, self._reader_table
        wait = self._wait("room for a message", reader_table.slowest, deadline)
        spin_s = self._spin_s
        while True:
            self._use_guard.check()
            if reader_table.all_left:
                raise PeerGoneError(f"no reader is left: {listed(reader_table.readers())}")
            room = end.room()
            at = self._find(nbytes, room)
            if at is not None:
                return at
            if room == self._places:
                most = self._ring.sizes.large_nbytes
                raise CapacityError(f"a message takes {nbytes} bytes, and the queue has room for {most}")
            # There is room for the entry, but not for its bytes: the slowest reader must release one more.
            end.poll(room + 1, spin_s, wait.pause())
            spin_s = 0.0

    def dequeue(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Any:
        self._check_reader()

    def acquire_read(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Any:
        self._check_reader()

    def _wake(self) -> None:
        words = self._ring.words
        for reader in range(self._ring.sizes.n_reader):
            words.wake(protocol.tail(reader))
            words.wake(self._ring.ready_word(reader))

    def _announce_end(self, deadline: Deadline) -> None:
        self._writing.end()
        self._remote_readers.close(deadline)

    def _end(self) -> None:
        self._admission.close()

    def _drop(self) -> None:
        """No thread is inside any more."""
        self._reader_table.drop()
        self._ring.close()

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        self._ring.close()
