"""The receiving half of a pipe: headers through a small stage, tensors straight into their memory.

Nothing is read ahead of a ``recv_tensor`` but what fits the stage, so a receiver that stops bounds what
its sender can get rid of. A message that is interrupted by a deadline keeps its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kvplug import KvplugError, TimeoutError
from kvplug.net.wire.frames import HEADER_SIZE
from kvplug.net.wire.messages import (
    SHORTEST_TENSOR_PREFIX,
    check_fits,
    is_dense,
    prefix_size,
    read_prefix,
)
from kvplug.net.wire.tensors import TensorMeta, copy_into, memory_of, memory_of_writable
from kvplug.transport import Deadline, Fate, TensorMismatchError, WireError
from kvplug_cpu.lane import Lane
from kvplug_cpu.memory import fresh
from kvplug_cpu.message import SPLIT, parts

if TYPE_CHECKING:
    from torch import Tensor

_STAGE_BYTES = 32 * 1024


class _Stage:
    """Bytes of lane 0 that were read before anybody knew where they belong."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._memory = memoryview(bytearray(_STAGE_BYTES))
        self._begin = self._end = 0

    def has(self, count: int, deadline: Deadline) -> bool:
        """Wait until ``count`` unread bytes are here; False at the deadline or the end of the stream."""
        while self._end - self._begin < count:
            if self._begin:
                rest = bytes(self._memory[self._begin : self._end])
                self._memory[: len(rest)] = rest
                self._begin, self._end = 0, len(rest)
            n = self._lane.receive_now(self._memory[self._end :])
            self._end += n
            if not n and (self._lane.ended or not self._lane.wait_readable(deadline)):
                return False
        return True

    def peek(self, count: int) -> bytes:
        """The next ``count`` bytes, or fewer if no more are here."""
        return bytes(self._memory[self._begin : min(self._begin + count, self._end)])

    def drop(self, count: int) -> None:
        self._begin += count

    def move_into(self, view: memoryview) -> int:
        """As much of ``view`` as is here already."""
        n = min(len(view), self._end - self._begin)
        view[:n] = self._memory[self._begin : self._begin + n]
        self._begin += n
        return n


class _Incoming:
    """A message whose announcement has been read: what it is, and how much of it has arrived."""

    def __init__(self, meta: TensorMeta | None, bounds: list[tuple[int, int]]) -> None:
        self.meta = meta
        self.bounds = bounds
        self.got = [0] * len(bounds)
        self.own: Tensor | None = None
        """Our own memory, where a part of it waits for the next call."""

    @property
    def complete(self) -> bool:
        return all(got == b - a for got, (a, b) in zip(self.got, self.bounds, strict=True))

    def keep(self, memory: memoryview) -> None:
        """Take what has arrived out of the caller's memory, which is the caller's again now."""
        if self.meta is not None and any(self.got):
            self.own = fresh(self.meta)
            mine = memory_of_writable(self.own)
            for got, (start, _) in zip(self.got, self.bounds, strict=True):
                mine[start : start + got] = memory[start : start + got]


class _SideReader:
    """Reads one lane's share while the caller's thread reads lane 0. Its thread starts when needed.

    Every ``start`` is followed by one ``result``, which comes also when the reader was stopped before.
    """

    def __init__(
        self,
        lane: Lane,
        index: int,
        *,
        lost: Callable[[], object],
        break_down: Callable[[str], None],
        enter: Callable[[], bool],
        leave: Callable[[], None],
    ) -> None:
        self.lane = lane
        self._index = index
        self._lost = lost
        self._break_down = break_down
        self._enter, self._leave = enter, leave
        self._jobs: SimpleQueue[tuple[memoryview, Deadline] | None] = SimpleQueue()
        self._results: SimpleQueue[int] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def start(self, view: memoryview, deadline: Deadline) -> None:
        if self.thread is None:
            if not self._enter():
                self._results.put(0)
                return
            thread = threading.Thread(
                target=self._read, name=f"kvplug-cpu-receive-{self._index}", daemon=True
            )
            try:
                thread.start()
            except BaseException:
                self._leave()
                raise
            self.thread = thread
        self._jobs.put((view, deadline))

    def result(self) -> int:
        return self._results.get()

    def stop(self) -> None:
        self._jobs.put(None)

    def _read(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                got = self.lane.receive(*job)
                if self.lane.ended:
                    self._lost()  # in the middle of a message: nobody needs to wait for the other lanes
                self._results.put(got)
                del job
        except Exception as e:
            self._break_down(f"reading a lane failed: {e!r}")
        finally:
            self._results.put(0)  # for whoever asked too late
            self._leave()


class Inbox:
    """``lost(reason)``: the peer is gone. ``break_down(reason)``: the stream has lost its place. Both
    wake every thread that reads. ``enter`` and ``leave`` as in the outbox.
    """

    def __init__(
        self,
        lanes: list[Lane],
        *,
        peer: str,
        fate: Fate,
        lost: Callable[[str], None],
        break_down: Callable[[str], None],
        enter: Callable[[], bool],
        leave: Callable[[], None],
    ) -> None:
        self._peer = peer
        self._fate = fate
        self._lost = lost
        self._break_down = break_down
        self._lane = lanes[0]
        self._lanes = len(lanes)
        self._stage = _Stage(lanes[0])
        self._side = [
            _SideReader(lane, k, lost=self._end_of_stream, break_down=break_down, enter=enter, leave=leave)
            for k, lane in enumerate(lanes[1:], 1)
        ]
        self._incoming: _Incoming | None = None

    def receive(self, out: Tensor | None, deadline: Deadline) -> Tensor | None:
        """Only one thread at a time. Raises as ``Pipe.recv_tensor``."""
        incoming = self._incoming
        if incoming is None:
            incoming = self._incoming = self._announced(deadline)
        meta = incoming.meta
        if meta is None:
            if out is not None:
                raise TensorMismatchError("the next message is None, and out= was given; it stays")
            self._incoming = None
            return None
        if out is not None:
            check_fits(out, meta)
        direct = incoming.own is None and out is not None and is_dense(out)
        if direct:
            tensor = out
        elif incoming.own is not None:
            tensor = incoming.own
        else:
            tensor = fresh(meta)
        assert tensor is not None
        memory = memory_of_writable(tensor)
        try:
            self._fill(incoming, memory, deadline)
        except BaseException:
            # Ctrl-C between the kernel's answer and our noting it: the stream's position is lost.
            self._break_down("interrupted in the middle of a message")
            for reader in self._side:
                reader.stop()
            raise
        if not incoming.complete:
            if self._lane.ended or any(reader.lane.ended for reader in self._side):
                raise self._end_of_stream()
            if self._fate.closed or self._fate.broken:
                raise self._fate.error()
            # Before anything is raised: what has arrived is part of the message that the next call returns.
            # Also when the peer takes nothing more: it may be closing, and still sending what it has.
            if direct:
                self._keep(incoming, memory)
            elif any(incoming.got):
                incoming.own = tensor
            raise TimeoutError(
                f"{sum(incoming.got)} of {meta.nbytes} bytes of a tensor have arrived from {self._peer};"
                " the next call goes on with it"
            )
        if out is not None and not direct:
            incoming.own = tensor
            try:
                copy_into(out, memory_of(tensor))
            except RuntimeError as e:
                raise TensorMismatchError(f"out= cannot be written, and the message stays: {e}") from e
            tensor = out
        self._incoming = None
        return tensor

    def stop(self) -> None:
        """End the side readers' threads, after their lanes were stopped."""
        for reader in self._side:
            reader.stop()

    def join(self) -> None:
        for reader in self._side:
            if reader.thread is not None and reader.thread is not threading.current_thread():
                reader.thread.join(1.0)

    def _keep(self, incoming: _Incoming, memory: memoryview) -> None:
        try:
            incoming.keep(memory)
        except BaseException:
            self._break_down("there was no memory for the part of a message that had arrived")
            raise

    def _announced(self, deadline: Deadline) -> _Incoming:
        stage = self._stage
        size = HEADER_SIZE
        try:
            while True:
                self._need(size, deadline)
                # Usually the whole prefix is here at once, so the second look is the last.
                wanted = prefix_size(stage.peek(max(size, SHORTEST_TENSOR_PREFIX)))
                if wanted <= size:
                    break
                size = wanted
            announcement = read_prefix(stage.peek(size))
        except WireError as e:
            self._break_down(f"what arrives is not a message: {e}")
            raise
        if announcement.goodbye:
            self._lost("the peer closed it")
            raise self._fate.error()
        stage.drop(size)
        meta = announcement.meta
        if meta is None:
            return _Incoming(None, [])
        nbytes = meta.nbytes
        return _Incoming(meta, parts(nbytes, self._lanes) if announcement.flags & SPLIT else [(0, nbytes)])

    def _need(self, count: int, deadline: Deadline) -> None:
        if self._stage.has(count, deadline):
            return
        if self._lane.ended:
            raise self._end_of_stream()
        raise TimeoutError(f"no message has arrived from {self._peer}; it is alive as far as can be seen")

    def _fill(self, incoming: _Incoming, memory: memoryview, deadline: Deadline) -> None:
        started = []
        for k, reader in enumerate(self._side[: len(incoming.bounds) - 1], 1):
            start, stop = incoming.bounds[k]
            if start + incoming.got[k] < stop:
                reader.start(memory[start + incoming.got[k] : stop], deadline)
                started.append((k, reader))
        start, stop = incoming.bounds[0]
        incoming.got[0] += self._stage.move_into(memory[start + incoming.got[0] : stop])
        if start + incoming.got[0] < stop:
            incoming.got[0] += self._lane.receive(memory[start + incoming.got[0] : stop], deadline)
            if self._lane.ended:
                self._end_of_stream()
        for k, reader in started:
            incoming.got[k] += reader.result()

    def _end_of_stream(self) -> KvplugError:
        """The lanes are over: whoever else waits on them is woken, and this is to be raised."""
        self._lost("the connection ended")
        return self._fate.error()
