"""The sending half of a pipe: what is queued, who copies it into the ring, and when the caller has to wait.

The caller's own thread copies its message, and looks for a moment for room where there is none. What does not
get in is left to a writer thread, which is started when first needed and the only one that sleeps on the
ring. An idle writer sleeps on a condition.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvplug import TimeoutError
from kvplug.transport import Deadline, Lifecycle, Transfer, WireError
from kvplug_shm.memory import waiting
from kvplug_shm.pipe.head import Head
from kvplug_shm.pipe.message import Message, NotTakenError, Step
from kvplug_shm.pipe.rings import Outgoing, Pieces

_INTERRUPTED = "interrupted in the middle of a message"
"""Ctrl-C between a copy and our noting it: the stream's position is lost."""


class Outbox:
    """``lost(reason)``: the peer takes nothing more. ``break_down(reason)``: its words cannot be true.

    Both are called without locks, and call :meth:`fail`.
    """

    def __init__(
        self,
        ring: Outgoing,
        *,
        peer: str,
        limit: int,
        pieces: Pieces,
        spin_s: float,
        lifecycle: Lifecycle,
        lost: Callable[[str], None],
        break_down: Callable[[str], None],
    ) -> None:
        self._ring: Outgoing | None = ring
        self._peer = peer
        self._limit = limit
        self._pieces = pieces
        self._spin_s = spin_s
        self._lifecycle = lifecycle
        self._lost = lost
        self._break_down = break_down
        # Re-entrant: a signal's handler may abort the pipe while its own thread is in here.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._queue: deque[Message] = deque()
        self._untold: list[Message] = []
        """Were queued when it all ended, and their transfers have not been."""
        self._queued_bytes = 0
        self._wanted = 0
        """Room that a caller waits for with nothing queued: the writer sleeps on the ring in its stead."""
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()
        """Held by whoever writes into the ring."""
        self._ended = False

    @property
    def ring_bytes(self) -> int:
        ring = self._ring
        return 0 if ring is None else ring.nbytes

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def send_at_once(self, head: Head, address: int) -> Transfer | None:
        """The transfer of a small message that there is room for; ``None``: leave it to :meth:`send`."""
        ring = self._ring
        if ring is None or self._queued_bytes:
            return None
        try:
            with self._writing:
                if self._ended or not ring.put(head, address, self._pieces, self._limit):
                    return None
        except WireError:
            return None  # it is not better in a moment
        except BaseException:
            self._break_down(_INTERRUPTED)
            raise
        finally:
            if self._ended:
                self._say_that_it_ended()
        transfer = Transfer(head.nbytes)
        transfer.finish()
        return transfer

    def send(self, message: Message, deadline: Deadline) -> Transfer:
        """Only one thread at a time. Raises as ``Pipe.send_tensor``."""
        ring = self._ring
        if ring is None:
            raise self._lifecycle.error()
        try:
            if not self._queued_bytes:
                ring.end.spun(self._room_for(message, ring), self._spin_s)
            with self._lock:
                self._wait_for_room(ring, message, deadline)
                message.step = Step.HELD
                self._queued_bytes += message.cost
                # The writer drops a message only after it was copied, so an empty queue is one nobody works
                # on, and this thread, the only sender, may write into the ring.
                idle = not self._queue
            if idle:
                self._copy_at_once(ring, message, deadline)
            return self._accepted(message)
        except WireError as e:
            self._break_down(str(e))
            raise
        except BaseException as e:
            self._take_back(message, e)
            raise

    def _take_back(self, message: Message, error: BaseException) -> None:
        """Its sender goes without it: it was never there, or it is the end of the pipe."""
        with self._lock:
            if message.step is Step.HELD:
                message.step = Step.OVER
                if not self._ended:
                    self._queued_bytes -= message.cost
                    self._room.notify_all()
            cut = message.step is Step.TOUCHED and not self._ended
        if cut:
            self._break_down(f"the rest of a message is not sent: {error!r}")

    def drain(self, deadline: Deadline) -> bool:
        """Refuse whoever waits for room, then wait until nothing is queued.

        False at the deadline, when the ring has ended, and to the writer itself. The pipe has ended already.
        """
        if threading.current_thread() is self._thread:
            return False  # in a callback of a transfer: nobody would do what is waited for
        with self._lock:
            self._room.notify_all()
            while self._queued_bytes and not self._ended:
                if not self._room.wait(deadline.remaining()) and deadline.expired:
                    return False
            return not self._ended

    def fail(self) -> None:
        """Everything queued fails with how it ended; whoever waits is woken. Blocks nowhere.

        What the writer is copying at this moment fails when it has let go of it.
        """
        with self._lock:
            if self._ring is not None:
                self._ring.end.evict(0)  # wakes the writer: the word it sleeps on changes
            self._ended = True
            self._untold.extend(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            self._work.notify_all()
            self._room.notify_all()
        self._say_that_it_ended()
        self._fail_untold(1 if self._writing.locked() else 0)

    def inherit(self) -> None:
        """This is a forked child: its parent's transfers end here too. Takes no lock."""
        self._ended, self._ring = True, None
        for message in [*self._queue, *self._untold]:
            message.transfer.inherit(self._lifecycle.error())

    def join(self) -> None:
        """Wait for the writer to be gone, after ``fail``."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    # -- the caller ----------------------------------------------------------------------------------

    def _wait_for_room(self, ring: Outgoing, message: Message, deadline: Deadline) -> None:
        """Under the lock, which is let go meanwhile."""
        while True:
            if self._lifecycle.ended or self._ended:
                raise self._lifecycle.error()
            held = self._queued_bytes + ring.nbytes - ring.end.room()
            if not held or held + message.cost <= self._limit:
                return
            try:
                if not self._queued_bytes:
                    self._wanted = self._room_for(message, ring)
                    self._wake_writer()
                if self._room.wait(deadline.remaining()) or not deadline.expired:
                    continue
            finally:
                self._wanted = 0
            raise TimeoutError(
                f"{self._peer} has not taken the {held} bytes that are queued for it;"
                f" there was no room for {message.transfer.nbytes} more (max_in_flight_bytes is"
                f" {self._limit}), and nothing was queued"
            )

    def _room_for(self, message: Message, ring: Outgoing) -> int:
        """Bytes of the ring that have to be free before it is accepted, with nothing queued."""
        return ring.nbytes - max(0, self._limit - message.cost)

    def _copy_at_once(self, ring: Outgoing, message: Message, deadline: Deadline) -> None:
        try:
            with self._writing:
                while not self._ended:
                    patient = not deadline.expired
                    if message.push(ring, self._pieces, self._publish, patient=patient):
                        if message.complete:
                            return
                    elif deadline.expired or not ring.end.spun(message.least(ring), self._spin_s):
                        return
        except NotTakenError:
            self._not_taken()
        finally:
            if self._ended:
                self._say_that_it_ended()

    def _accepted(self, message: Message) -> Transfer:
        if not message.complete and not self._ended:
            message.content.leave(message.done)
        with self._lock:
            complete, ended = message.complete, self._ended
            if not ended:
                if complete:
                    self._settle(message)
                else:
                    self._wake_writer()
                    message.step = Step.QUEUED
                    self._queue.append(message)
        if complete:
            message.transfer.finish()
        elif ended:
            if not message.announced:
                raise self._lifecycle.error()
            message.transfer.fail(self._lifecycle.error())
        return message.transfer

    # -- the ring ------------------------------------------------------------------------------------

    def _publish(self, ring: Outgoing, count: int) -> bool:
        with self._lock:
            if not self._ended:
                ring.end.publish(count)
            return not self._ended

    def _not_taken(self) -> None:
        if not self._ended:  # that looks the same
            self._lost("it takes nothing more")

    def _say_that_it_ended(self) -> None:
        """The peer is told by the last one out: whoever writes just now says it afterwards."""
        if self._ended and self._writing.acquire(blocking=False):
            try:
                ring, self._ring = self._ring, None
                if ring is not None:
                    ring.end.end()
            finally:
                self._writing.release()
            self._fail_untold(0)

    def _fail_untold(self, but: int) -> None:
        """All but so many of the oldest."""
        while True:
            with self._lock:
                if len(self._untold) <= but:
                    return
                message = self._untold.pop(but)
            message.transfer.fail(self._lifecycle.error())

    # -- the writer ----------------------------------------------------------------------------------

    def _wake_writer(self) -> None:
        if self._thread is None:
            thread = threading.Thread(
                target=self._write, args=(self._ring,), name="kvplug-shm-send", daemon=True
            )
            thread.start()
            self._thread = thread
        else:
            self._work.notify()

    def _write(self, ring: Outgoing) -> None:
        try:
            while (message := self._next(ring)) is not None:
                with self._writing:
                    pushed = message.push(ring, self._pieces, self._publish)
                if message.complete:
                    self._sent(message)
                elif not pushed:
                    self._sleep(ring, message.least(ring))
                del message  # the memory that was sent is not held until there is more to send
        except NotTakenError:
            self._not_taken()
        except BaseException as e:  # a callback may raise SystemExit, which nobody would see
            self._break_down(f"writing into the ring failed: {e!r}")
        finally:
            self._say_that_it_ended()

    def _next(self, ring: Outgoing) -> Message | None:
        """The oldest message; ``None`` at the end. Until there is one, this is who sleeps for a caller."""
        while True:
            with self._lock:
                if threading.current_thread() is not self._thread:
                    return None  # whoever started it was interrupted, and has not noted it
                while not (self._queue or self._wanted or self._ended):
                    self._work.wait()
                if self._ended:
                    return None
                if self._queue:
                    return self._queue[0]
                wanted = self._wanted
                if ring.end.awaited(wanted) is None:
                    self._wanted = 0
                    self._room.notify_all()
                    continue
            ring.end.room()  # raises, if what the reader says is why there is none
            self._sleep(ring, wanted)

    def _sleep(self, ring: Outgoing, count: int) -> None:
        if not ring.end.spun(count, self._spin_s):
            awaited = ring.end.awaited(count)
            if awaited is not None:
                waiting.nap(ring.end, awaited, None)

    def _sent(self, message: Message) -> None:
        with self._lock:
            if not self._ended:
                self._queue.popleft()
                self._settle(message)
        message.transfer.finish()

    def _settle(self, message: Message) -> None:
        message.step = Step.OVER
        self._queued_bytes -= message.cost
        message.content.drop()
        self._room.notify_all()
