"""The sending half of a pipe: the queue, the threads that copy it into the ring, and when the caller has to
wait.

The caller's own thread copies its message, and spins for a moment if the ring has no room. The rest is left
to a writer thread, which starts with the first such message and sleeps on the ring while a message is queued.
An idle writer sleeps on a condition. A caller whose message the window does not admit yet sleeps on a
condition while a message is queued, and otherwise on the ring.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvplug.transport import (
    BackgroundThread,
    Deadline,
    DuplexPipe,
    PartialMessage,
    SendWindow,
    Transfer,
    WireError,
)
from kvplug_shm.pipe.geometry import LINE, SMALLEST_COST
from kvplug_shm.pipe.message import Header, Message, Progress
from kvplug_shm.pipe.rings import Outgoing


class _NotTakenError(Exception):
    """The peer has ended reading."""


class _Window(SendWindow):
    """Counts the bytes that are queued and those in the ring that the peer has not read."""

    SMALLEST_COST = SMALLEST_COST

    def __init__(self, ring: Outgoing, *, limit: int, peer: str, lifecycle: DuplexPipe.Lifecycle) -> None:
        super().__init__(limit=limit, peer=peer, lifecycle=lifecycle)
        self._ring: Outgoing | None = ring

    @property
    def held(self) -> int:
        ring = self._ring
        return self.in_flight + (0 if ring is None else ring.unread())

    def room_for(self, cost: int, ring: Outgoing) -> int:
        """Bytes of the ring that must be free before a message is admitted to an empty queue."""
        return ring.room_with(max(0, self.limit - cost))

    def end(self) -> None:
        super().end()
        self._ring = None  # the memory goes with the last reference

    def _wait(self, cost: int, deadline: Deadline) -> bool:
        ring = self._ring
        if self.in_flight or ring is None:
            return self.room.wait(deadline.remaining())
        # Nothing is queued, so the writer leaves the ring alone. The end of the pipe changes the word.
        try:
            self.lock.release()
            has_room = ring.end.poll(self.room_for(cost, ring), nap_s=deadline.remaining())
        finally:
            self.lock.acquire()
        return has_room and not deadline.expired  # the peer may show room and withdraw it


class Outbox:
    """``lost(reason)``: the peer receives nothing more. ``fail_pipe(reason)``: its words are invalid.

    Both are called without locks, and call :meth:`fail`; so does ``stop()``, when the program leaves.
    """

    def __init__(
        self,
        ring: Outgoing,
        *,
        peer: str,
        limit: int,
        lifecycle: DuplexPipe.Lifecycle,
        lost: Callable[[str], None],
        fail_pipe: Callable[[str], None],
        stop: Callable[[], None],
    ) -> None:
        self.ring: Outgoing | None = ring
        """``None`` when it has ended."""
        self._lifecycle = lifecycle
        self._lost = lost
        self._fail_pipe = fail_pipe
        self._stop = stop
        self._window = _Window(ring, limit=limit, peer=peer, lifecycle=lifecycle)
        self._lock = self._window.lock
        self._work = threading.Condition(self._lock)
        self._queue: deque[Message] = deque()
        self._unresolved: list[Message] = []
        """Messages that were queued at the end, whose transfers are not failed yet."""
        self._thread: BackgroundThread | None = None
        self._writing = threading.Lock()
        """Held by the thread that writes into the ring."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of messages that are not in the ring yet."""
        return self._window.in_flight

    # -- the caller ----------------------------------------------------------------------------------

    def send_at_once(self, header: Header, address: int) -> Transfer | None:
        """Send a small message if the ring has room for it; ``None``: leave it to :meth:`send`."""
        ring, window = self.ring, self._window
        if ring is None or window.in_flight:
            return None
        try:
            with self._writing:
                if window.ended or not ring.put(header, address, window.limit):
                    return None
        except WireError:
            return None  # send raises it
        except BaseException:
            self._fail_pipe(PartialMessage.INTERRUPTED)
            raise
        finally:
            if window.ended:
                self._end_ring()
        transfer = Transfer(header.nbytes)
        transfer.finish()
        return transfer

    def send(self, message: Message, deadline: Deadline) -> Transfer:
        """Only one thread at a time. Raises as ``Pipe.send_tensor``."""
        ring, window, cost = self.ring, self._window, message.header.cost
        if ring is None:
            raise self._lifecycle.error()
        try:
            if not window.in_flight:
                ring.end.poll(window.room_for(cost, ring), ring.spin_s)
            with self._lock:
                window.wait_for_room(message.header.nbytes, deadline)
                message.progress = Progress.ADMITTED
                window.add(cost)
                # The writer drops a message only after it was copied, so with an empty queue this thread, the
                # only sender, may write into the ring.
                idle = not self._queue
            if idle:
                self._copy_at_once(ring, message, deadline)
            return self._accepted(message)
        except WireError as e:
            self._fail_pipe(str(e))
            raise
        except BaseException as e:
            self._take_back(message, e)
            raise

    def _copy_at_once(self, ring: Outgoing, message: Message, deadline: Deadline) -> None:
        """Copy until the message is complete, or the ring has no room at once."""
        try:
            with self._writing:
                while not self._window.ended:
                    if self._push(ring, message, patient=not deadline.expired):
                        if message.complete:
                            return
                    elif deadline.expired or not ring.end.poll(
                        ring.room_for(message.least_room), ring.spin_s
                    ):
                        return
        except _NotTakenError:
            self._not_taken()
        finally:
            if self._window.ended:
                self._end_ring()

    def _accepted(self, message: Message) -> Transfer:
        window = self._window
        with self._lock:
            complete, ended = message.complete, window.ended
            if not ended:
                if complete:
                    self._settle(message)
                else:
                    self._wake_writer()
                    message.progress = Progress.QUEUED
                    self._queue.append(message)
        if complete:
            message.transfer.finish()
        elif ended:
            if not message.announced:
                raise self._lifecycle.error()
            message.transfer.fail(self._lifecycle.error())
        return message.transfer

    def _take_back(self, message: Message, error: BaseException) -> None:
        """The call raises: remove the message, or end the pipe if a part of it was written."""
        with self._lock:
            if message.progress is Progress.ADMITTED:
                message.progress = Progress.OVER
                if not self._window.ended:
                    self._window.settle(message.header.cost)
            cut = message.progress is Progress.TOUCHED and not self._window.ended
        if cut:
            self._fail_pipe(f"the rest of a message is not sent: {error!r}")

    # -- the ring ------------------------------------------------------------------------------------

    def _push(self, ring: Outgoing, message: Message, *, patient: bool = True) -> bool:
        """Copy as much of the oldest message as possible without sleeping, and publish it.

        Returns whether any was. Spins for room if ``patient``. Only for the thread that holds ``_writing``.

        Raises:
            _NotTakenError: the peer has ended reading.
            WireError: the peer's words are impossible.
        """
        end, header = ring.end, message.header
        room = end.room() & -LINE
        if room == ring.nbytes and end.over(0):
            raise _NotTakenError
        if room < ring.room_for(message.least_room):
            return False
        if message.progress is Progress.ADMITTED:
            message.progress = Progress.TOUCHED
        prefix = b"" if message.announced else header.prefix
        before = end.sent
        message.done += ring.push(prefix, message.span, message.done, header.nbytes, patient=patient)
        if end.sent == before:
            return False
        message.announced = True
        return True

    def _not_taken(self) -> None:
        if not self._window.ended:  # the ring of a pipe that was ended here looks the same
            self._lost("it takes nothing more")

    def _end_ring(self) -> None:
        """Mark in the ring that nothing more is written. The last writing thread does it."""
        if self._window.ended and self._writing.acquire(blocking=False):
            try:
                ring, self.ring = self.ring, None
                if ring is not None:
                    ring.end.end()
            finally:
                self._writing.release()
            self._fail_unresolved(keep=0)

    def _fail_unresolved(self, keep: int) -> None:
        """The transfers of all but the oldest ``keep``."""
        while True:
            with self._lock:
                if len(self._unresolved) <= keep:
                    return
                message = self._unresolved.pop(keep)
            message.transfer.fail(self._lifecycle.error())

    # -- the writer ----------------------------------------------------------------------------------

    def _wake_writer(self) -> None:
        if self._thread is None:
            thread = BackgroundThread(self._write, args=(self.ring,), name="kvplug-shm-send", stop=self._stop)
            thread.start()
            self._thread = thread
        else:
            self._work.notify()

    def _write(self, ring: Outgoing) -> None:
        try:
            while (message := self._next()) is not None:
                with self._writing:
                    pushed = self._push(ring, message)
                if message.complete:
                    self._sent(message)
                elif not pushed:
                    ring.end.poll(ring.room_for(message.least_room), ring.spin_s, None)
                del message  # the memory that was sent is not held until there is more to send
        except _NotTakenError:
            self._not_taken()
        except BaseException as e:  # a callback may raise SystemExit, which would end the thread in silence
            self._fail_pipe(f"writing into the ring failed: {e!r}")
        finally:
            self._end_ring()

    def _next(self) -> Message | None:
        """The oldest message; ``None`` at the end. The writer sleeps until there is one."""
        with self._lock:
            if threading.current_thread() is not self._thread:
                return None  # the thread that started it was interrupted before it noted it
            while not (self._queue or self._window.ended):
                self._work.wait()
            return None if self._window.ended else self._queue[0]

    def _sent(self, message: Message) -> None:
        with self._lock:
            if not self._window.ended:
                self._queue.popleft()
                self._settle(message)
        message.transfer.finish()

    def _settle(self, message: Message) -> None:
        message.progress = Progress.OVER
        message.drop()
        self._window.settle(message.header.cost)

    # -- how it ends ---------------------------------------------------------------------------------

    def drain(self, deadline: Deadline) -> bool:
        """Refuse senders that wait for room, then wait until nothing is queued.

        False at the deadline, when the ring has ended, and in the writer itself. The pipe has ended before.
        """
        if threading.current_thread() is self._thread:
            return False  # in a callback of a transfer: what is queued is this thread's to write
        return self._window.drain(deadline)

    def fail(self) -> None:
        """Fail everything queued with the reason of the pipe's end; wake waiting threads. Never blocks.

        A message that the writer is copying fails after the copy.
        """
        with self._lock:
            if self.ring is not None:
                self.ring.end.evict(0)  # wakes the writer: the word it sleeps on changes
            self._unresolved.extend(self._queue)
            self._queue.clear()
            self._window.in_flight = 0
            self._work.notify_all()
            self._window.end()
        self._end_ring()
        self._fail_unresolved(keep=1 if self._writing.locked() else 0)

    def after_fork(self) -> None:
        """This is a forked child: drop the parent's memory."""
        self.ring = self._window._ring = None

    def join(self) -> None:
        """Wait until the writer has ended, after ``fail``."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
