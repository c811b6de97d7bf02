"""The sending half of a pipe: what is queued, who sends it, and when the caller has to wait.

A message is first offered to the kernel in the caller's own thread, without waiting: a small one is
gone before any other thread would have woken up. What the kernel does not take is left to one writer
thread per lane, started when first needed. An idle writer sleeps on a condition.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvplug import TimeoutError
from kvplug.transport import Deadline, Fate, Transfer
from kvplug_cpu.lane import Lane
from kvplug_cpu.message import Content, parts

_SMALLEST_COST = 256
"""What an empty message counts for, so that a stopped receiver bounds their number too."""
_BATCH_BYTES = 256 * 1024
_BATCH_VIEWS = 64


class _Message:
    __slots__ = ("content", "cost", "lanes_left", "transfer")

    def __init__(self, content: Content, lanes: int) -> None:
        self.content: Content | None = content
        self.cost = max(_SMALLEST_COST, len(content.memory))
        self.lanes_left = lanes
        self.transfer = Transfer(len(content.memory))


class _Share:
    """The part of one message that goes over one lane."""

    __slots__ = ("message", "nbytes", "views")

    def __init__(self, message: _Message, view: memoryview) -> None:
        self.message = message
        self.nbytes = len(view)
        self.views = [view] if len(view) else []

    def announce(self, prefix: bytes) -> None:
        self.views.insert(0, memoryview(prefix))
        self.nbytes += len(prefix)

    def advance(self, sent: int) -> None:
        self.nbytes -= sent
        while sent:
            if sent < len(self.views[0]):
                self.views[0] = self.views[0][sent:]
                return
            sent -= len(self.views.pop(0))


class _Queue:
    def __init__(self, lane: Lane, lock: threading.Lock) -> None:
        self.lane = lane
        self.shares: deque[_Share] = deque()
        self.changed = threading.Condition(lock)
        self.thread: threading.Thread | None = None


class Outbox:
    """``lost(reason)``: a lane takes nothing more. ``break_down(reason)``: the stream has lost its place.

    Both are called without locks. ``enter`` and ``leave``: a thread is using the pipe's descriptors.
    """

    def __init__(
        self,
        lanes: list[Lane],
        *,
        peer: str,
        limit: int,
        fate: Fate,
        lost: Callable[[str], None],
        break_down: Callable[[str], None],
        enter: Callable[[], bool],
        leave: Callable[[], None],
    ) -> None:
        self._peer = peer
        self._limit = limit
        self._fate = fate
        self._lost = lost
        self._break_down = break_down
        self._enter, self._leave = enter, leave
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._queues = [_Queue(lane, self._lock) for lane in lanes]
        self._in_flight = 0
        self._ended = False

    def send(self, content: Content, deadline: Deadline) -> Transfer:
        """Only one thread at a time. Raises as ``Pipe.send_tensor``."""
        bounds = [(0, len(content.memory))]
        if content.split:
            bounds = parts(len(content.memory), len(self._queues))
        message = _Message(content, len(bounds))
        shares = [_Share(message, content.memory[a:b]) for a, b in bounds]
        shares[0].announce(content.prefix)
        with self._lock:
            self._wait_for_room(message, deadline)
            self._in_flight += message.cost
            # A writer drops a share only after it was sent, so an empty queue is one nobody works on,
            # and this thread, the only sender, may write to its lane.
            idle = [not queue.shares for queue in self._queues]
        try:
            for queue, share, free in zip(self._queues, shares, idle, strict=False):
                if free:
                    share.advance(queue.lane.send_now(share.views) if share.nbytes else 0)
        except OSError as e:
            self._broken(e)
        except BaseException:
            # Ctrl-C between the kernel's answer and our noting it: the stream's position is lost.
            self._break_down("interrupted in the middle of a message")
            raise
        try:
            with self._lock:
                for queue, share in zip(self._queues, shares, strict=False):
                    if not share.nbytes:
                        message.lanes_left -= 1
                    elif not self._ended:
                        queue.shares.append(share)
                        self._wake(queue)
                done, ended = message.lanes_left == 0, self._ended
                if done:
                    self._settle(message)
        except BaseException as e:
            # No thread could be started, say. Part of the message may be gone, and the rest will not go.
            self._break_down(f"the rest of a message could not be left to a writer: {e!r}")
            raise
        if done:
            message.transfer.finish()
        elif ended:
            message.transfer.fail(self._fate.error())
        return message.transfer

    def drain(self, deadline: Deadline) -> bool:
        """Refuse whoever waits for room, then wait until nothing is queued.

        False at the deadline, or when the lanes have ended. The pipe's fate is sealed already.
        """
        with self._lock:
            self._room.notify_all()
            while self._in_flight and not self._ended:
                if not self._room.wait(deadline.remaining()) and deadline.expired:
                    return False
            return not self._ended

    def fail(self) -> None:
        """Everything queued fails with what the fate says; writers and waiters go."""
        with self._lock:
            self._ended = True
            lost = {id(s.message): s.message for queue in self._queues for s in queue.shares}
            for queue in self._queues:
                queue.shares.clear()
                queue.changed.notify_all()
            self._room.notify_all()
        for message in lost.values():
            message.transfer.fail(self._fate.error())
            message.content = None

    def inherit(self) -> None:
        """This is a forked child: its parent's transfers end here too. Takes no lock."""
        for queue in self._queues:
            for share in list(queue.shares):
                share.message.transfer.inherit(self._fate.error())

    def join(self) -> None:
        """Wait for the writers to be gone, after ``fail`` and after the lanes were stopped."""
        for queue in self._queues:
            thread = queue.thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(1.0)

    def _wait_for_room(self, message: _Message, deadline: Deadline) -> None:
        while True:
            if self._fate.sealed or self._ended:
                raise self._fate.error()
            if not self._in_flight or self._in_flight + message.cost <= self._limit:
                return
            if not self._room.wait(deadline.remaining()) and deadline.expired:
                raise TimeoutError(
                    f"{self._peer} has not taken the {self._in_flight} bytes that are queued for it;"
                    f" there was no room for {message.transfer.nbytes} more (max_in_flight_bytes is"
                    f" {self._limit}), and nothing was queued"
                )

    def _wake(self, queue: _Queue) -> None:
        if queue.thread is None:
            if not self._enter():
                return
            index = self._queues.index(queue)
            thread = threading.Thread(
                target=self._write, args=(queue,), name=f"kvplug-cpu-send-{index}", daemon=True
            )
            try:
                thread.start()
            except BaseException:
                self._leave()
                raise
            queue.thread = thread
        else:
            queue.changed.notify()

    def _write(self, queue: _Queue) -> None:
        try:
            while batch := self._next_batch(queue):
                views = [view for share in batch for view in share.views]
                self._sent(queue, batch, queue.lane.send(views))
                del batch, views  # the memory that was sent is not held until there is more to send
        except OSError as e:
            self._broken(e)
        except Exception as e:
            self._break_down(f"writing to a lane failed: {e!r}")
        finally:
            self._leave()

    def _next_batch(self, queue: _Queue) -> list[_Share]:
        """The oldest share, and small ones behind it, so that a stream of those costs few calls."""
        with self._lock:
            while not queue.shares and not self._ended:
                queue.changed.wait()
            batch: list[_Share] = []
            views = nbytes = 0
            for share in queue.shares:
                views, nbytes = views + len(share.views), nbytes + share.nbytes
                if batch and (nbytes > _BATCH_BYTES or views > _BATCH_VIEWS):
                    break
                batch.append(share)
            return batch

    def _sent(self, queue: _Queue, batch: list[_Share], sent: int) -> None:
        finished = []
        with self._lock:
            if self._ended:
                return
            for share in batch:
                step = min(sent, share.nbytes)
                share.advance(step)
                sent -= step
                if share.nbytes:
                    break
                queue.shares.popleft()
                share.message.lanes_left -= 1
                if not share.message.lanes_left:
                    self._settle(share.message)
                    finished.append(share.message)
        for message in finished:
            message.transfer.finish()

    def _settle(self, message: _Message) -> None:
        self._in_flight -= message.cost
        message.content = None
        self._room.notify_all()

    def _broken(self, error: OSError) -> None:
        """A lane refused bytes: the peer is gone, or closed. What it sent before can still be read."""
        self._lost(f"the connection broke while sending: {error.strerror or error}")
