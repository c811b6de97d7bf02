"""The receiving half of a pipe: headers pass through a small buffer, tensors go straight into their memory.

Before a ``recv_tensor`` only what fits the buffer is read, so a receiver that stops also stops its sender. A
message that is interrupted by a deadline is resumed by the next call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import select
import socket
import struct
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from kvplug import KvplugError, TimeoutError
from kvplug.net.wire.frames import HEADER_SIZE
from kvplug.net.wire.messages import SHORTEST_TENSOR_PREFIX, prefix_size, read_prefix
from kvplug.net.wire.tensors import TensorMeta, empty_like_meta, memory_of_writable
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    DescriptorGuard,
    DuplexPipe,
    MessageLimit,
    PartialMessage,
    WireError,
)

if TYPE_CHECKING:
    from torch import Tensor

SPLIT = 1
"""Flag: the tensor's bytes are spread over all connections."""
_PAGE = 4096
_LONGEST_POLL_S = 1e6
_STAGE_BYTES = 32 * 1024
_HUGE_PAGE: Final = 2 * 1024 * 1024
_ALWAYS_FRESH_BYTES: Final = 32 * 1024 * 1024
"""glibc maps and unmaps blocks above this each time; smaller ones it recycles, and there asking for huge
pages was measured to cost more than it saves (64 MiB: 4.7 against 2.7 GB/s; 16 MiB: twice the CPU time)."""


class _Stream:
    """One connected socket, from which bytes go straight into their memory."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._is_limited = False
        self.ended = False
        """The stream has been read to its end: nothing more will come."""

    def receive_now(self, view: memoryview) -> int:
        """Read what has arrived, without waiting; 0 if nothing has, or if the stream has ended."""
        return self._received(view, socket.MSG_DONTWAIT) or 0

    def receive(self, view: memoryview, deadline: Deadline) -> int:
        """Fill ``view``; returns fewer bytes only at the deadline or at the end of the stream."""
        got = 0
        while got < len(view):
            left = deadline.remaining()
            if left == 0.0:
                n = self._received(view[got:], socket.MSG_DONTWAIT)
            else:
                # A signal ends the call if a byte has arrived; if none has, Python would restart it with its
                # whole time limit.
                if left is not None and not self.wait_readable(deadline):
                    continue
                self._limit(left)
                n = self._received(view[got:], socket.MSG_WAITALL)
                if n is None:
                    continue
            if not n:
                break
            got += n
        return got

    def _received(self, view: memoryview, flags: int) -> int | None:
        """Return how many bytes came: 0 at the end of the stream, ``None`` if none came in time."""
        try:
            n = self._sock.recv_into(view, 0, flags)
        except BlockingIOError:
            return None
        except OSError:
            n = 0
        self.ended = n == 0
        return n

    def wait_readable(self, deadline: Deadline) -> bool:
        """Wait until ``receive_now`` would return bytes or notice the end; False at the deadline."""
        left = deadline.remaining()
        return bool(self._readable.poll(None if left is None else min(left, _LONGEST_POLL_S) * 1000))

    def _limit(self, seconds: float | None) -> None:
        # When the kernel's own receive timeout passes, it returns the bytes that have arrived, as resuming
        # needs. Zero means no timeout.
        if seconds is None and not self._is_limited:
            return
        micros = 0 if seconds is None else max(1, int(seconds * 1e6))
        timeval = struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._is_limited = seconds is not None


class _Stage(_Stream):
    """Connection 0: bytes may be read before their destination is known."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._memory = memoryview(bytearray(_STAGE_BYTES))
        self._begin = self._end = 0

    def has(self, count: int, deadline: Deadline) -> bool:
        """Wait until ``count`` unread bytes have arrived; False at the deadline or the end of the stream."""
        while self._end - self._begin < count:
            if self._begin:
                rest = bytes(self._memory[self._begin : self._end])
                self._memory[: len(rest)] = rest
                self._begin, self._end = 0, len(rest)
            n = self.receive_now(self._memory[self._end :])
            self._end += n
            if not n and (self.ended or not self.wait_readable(deadline)):
                return False
        return True

    def peek(self, count: int) -> bytes:
        """The next ``count`` bytes, or fewer if fewer have arrived."""
        return bytes(self._memory[self._begin : min(self._begin + count, self._end)])

    def drop(self, count: int) -> None:
        self._begin += count

    def move_into(self, view: memoryview) -> int:
        """Fill as much of ``view`` as has arrived already."""
        n = min(len(view), self._end - self._begin)
        view[:n] = self._memory[self._begin : self._begin + n]
        self._begin += n
        return n


class _Incoming(PartialMessage):
    """A message whose bytes come over one connection, or split over all of them."""

    __slots__ = ("bounds", "got_by_share")

    def __init__(self, meta: TensorMeta | None, bounds: list[tuple[int, int]]) -> None:
        """``bounds``: (start, stop) of each connection's share."""
        super().__init__(meta)
        self.bounds = bounds
        self.got_by_share = [0] * len(bounds)

    def add(self, share: int, nbytes: int) -> None:
        self.got_by_share[share] += nbytes
        self.got += nbytes

    def left(self, share: int) -> tuple[int, int]:
        """(start, stop) of the part of a share that has not arrived."""
        start, stop = self.bounds[share]
        return start + self.got_by_share[share], stop

    def arrived(self) -> list[tuple[int, int]]:
        return [(start, start + got) for got, (start, _) in zip(self.got_by_share, self.bounds, strict=True)]


class _SideReader:
    """Reads one connection's share while the caller reads connection 0. Its thread starts when needed.

    Every ``start`` is followed by one ``result``, which comes also when the reader was stopped before.
    """

    def __init__(
        self,
        sock: socket.socket,
        index: int,
        *,
        descriptors: DescriptorGuard,
        lost: Callable[[], object],
        fail: Callable[[str], None],
        stop: Callable[[], None],
    ) -> None:
        self.stream = _Stream(sock)
        self._index = index
        self._descriptors = descriptors
        self._lost = lost
        self._fail = fail
        self._stop_pipe = stop
        self._jobs: SimpleQueue[tuple[memoryview, Deadline] | None] = SimpleQueue()
        self._results: SimpleQueue[int] = SimpleQueue()
        self.thread: BackgroundThread | None = None

    def start(self, view: memoryview, deadline: Deadline) -> None:
        if self.thread is None:
            if not self._descriptors.enter():
                self._results.put(0)
                return
            thread = BackgroundThread(
                self._read, name=f"kvplug-cpu-receive-{self._index}", stop=self._stop_pipe
            )
            try:
                thread.start()
            except Exception:  # after Ctrl-C the thread may run, and leave itself
                self._descriptors.leave()
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
                got = self.stream.receive(*job)
                if self.stream.ended:
                    self._lost()  # in the middle of a message: the other connections need not be waited for
                self._results.put(got)
                del job
        except Exception as e:
            self._fail(f"reading a connection failed: {e!r}")
        finally:
            self._results.put(0)  # for a caller that asked too late
            self._descriptors.leave()


class Inbox:
    """``lost(reason)``: the peer is gone. ``fail(reason)``: the stream's position is lost.

    Both wake every thread that reads. ``stop()`` ends the pipe at once, when the program leaves.
    """

    def __init__(
        self,
        socks: list[socket.socket],
        *,
        peer: str,
        message_limit: MessageLimit,
        lifecycle: DuplexPipe.Lifecycle,
        descriptors: DescriptorGuard,
        lost: Callable[[str], None],
        fail: Callable[[str], None],
        stop: Callable[[], None],
    ) -> None:
        self._peer = peer
        self._limit = message_limit
        self._lifecycle = lifecycle
        self._lost = lost
        self._fail = fail
        self._first = _Stage(socks[0])
        self._num_connections = len(socks)
        self._side = [
            _SideReader(each, k, descriptors=descriptors, lost=self._end_of_stream, fail=fail, stop=stop)
            for k, each in enumerate(socks[1:], 1)
        ]
        self._incoming: _Incoming | None = None

    def receive(self, out: Tensor | None, deadline: Deadline) -> Tensor | None:
        """Only one thread at a time. Raises as ``Pipe.recv_tensor``."""
        message = self._incoming
        if message is None:
            message = self._incoming = self._announced(deadline)
        message.check_out(out)
        tensor = None
        if message.meta is not None:
            tensor = message.receive(
                out,
                allocate=fresh,
                fill=lambda memory: self._fill(message, memory_of_writable(memory), deadline),
                fail=self._fail,
                peer=self._peer,
                limit=self._limit,
            )
        self._incoming = None
        return tensor

    def stop(self) -> None:
        """End the side readers' threads, after their connections were stopped."""
        for reader in self._side:
            reader.stop()

    @property
    def threads(self) -> list[BackgroundThread | None]:
        """The side readers' threads."""
        return [reader.thread for reader in self._side]

    def _announced(self, deadline: Deadline) -> _Incoming:
        first = self._first
        size = HEADER_SIZE
        try:
            while True:
                self._need(size, deadline)
                # Usually the whole prefix has arrived, so the second pass is the last.
                wanted = prefix_size(first.peek(max(size, SHORTEST_TENSOR_PREFIX)))
                if wanted <= size:
                    break
                size = wanted
            announcement = read_prefix(first.peek(size))
        except WireError as e:
            self._fail(f"what arrives is not a message: {e}")
            raise
        if announcement.goodbye:
            self._lost(DuplexPipe.Lifecycle.CLOSED_BY_PEER)
            raise self._lifecycle.error()
        first.drop(size)
        meta = announcement.meta
        if meta is None:
            return _Incoming(None, [])
        nbytes = meta.nbytes
        return _Incoming(
            meta, parts(nbytes, self._num_connections) if announcement.flags & SPLIT else [(0, nbytes)]
        )

    def _need(self, count: int, deadline: Deadline) -> None:
        if self._first.has(count, deadline):
            return
        if self._first.ended:
            raise self._end_of_stream()
        raise TimeoutError(f"no message has arrived from {self._peer}; it is alive as far as can be seen")

    def _fill(self, message: _Incoming, memory: memoryview, deadline: Deadline) -> bool:
        """Receive the rest; False at the deadline. Raises the pipe's end, if that is the cause."""
        try:
            self._read(message, memory, deadline)
        except BaseException:
            for reader in self._side:
                reader.stop()
            raise
        if message.got == message.nbytes:
            return True
        if self._first.ended or any(reader.stream.ended for reader in self._side):
            raise self._end_of_stream()
        if self._lifecycle.closed or self._lifecycle.broken:
            raise self._lifecycle.error()
        # Also when the peer receives nothing more: it may be closing, and still sending its queue.
        return False

    def _read(self, message: _Incoming, memory: memoryview, deadline: Deadline) -> None:
        started = []
        for k, reader in enumerate(self._side[: len(message.bounds) - 1], 1):
            start, stop = message.left(k)
            if start < stop:
                reader.start(memory[start:stop], deadline)
                started.append((k, reader))
        start, stop = message.left(0)
        message.add(0, self._first.move_into(memory[start:stop]))
        start, stop = message.left(0)
        if start < stop:
            message.add(0, self._first.receive(memory[start:stop], deadline))
            if self._first.ended:
                self._end_of_stream()
        for k, reader in started:
            message.add(k, reader.result())

    def _end_of_stream(self) -> KvplugError:
        """The connections have ended: wake other threads that wait on them. Returns the error to raise."""
        self._lost("the connection ended")
        return self._lifecycle.error()


def fresh(meta: TensorMeta) -> Tensor:
    """A new tensor; a large one asks for huge pages, since touching new 4 KiB pages costs more than a copy.

    Raises:
        ResourceExhaustedError: there is not that much memory.
    """
    tensor = empty_like_meta(meta)
    if meta.nbytes >= _ALWAYS_FRESH_BYTES:
        start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        stop = (tensor.data_ptr() + meta.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        with contextlib.suppress(OSError, AttributeError):  # a hint: refusal does not matter
            _madvise()(start, stop - start, mmap.MADV_HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    """Raises OSError, AttributeError: the C library has none."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def parts(nbytes: int, count: int) -> list[tuple[int, int]]:
    """(start, stop) of each connection's part of a split tensor: whole pages, as even as possible."""
    share = -(-nbytes // (count * _PAGE)) * _PAGE
    return [(min(k * share, nbytes), min((k + 1) * share, nbytes)) for k in range(count)]
