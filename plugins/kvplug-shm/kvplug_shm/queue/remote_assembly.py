"""Assembly of messages from the network's frames, in order."""

from __future__ import annotations

import mmap
from collections import deque
from typing import Final

import attrs

from kvplug import TransportError
from kvplug.transport import MessageLimit, NamedExhaustion, WireError
from kvplug_shm.memory.copying import into
from kvplug_shm.queue.network import QueueMessage
from kvplug_shm.queue.remote_frames import First, Piece

_GRAIN: Final = 1 << 20
_IDLE_MEMORIES: Final = 2
"""Memory that is kept for the next large message: fresh pages cost more than the copy."""


@attrs.define(eq=False)
class _Large:
    """A message that arrives in pieces."""

    first: First
    memory: mmap.mmap
    arrived: int = 0

    @property
    def nbytes(self) -> int:
        return self.first.head_bytes + self.first.body_bytes


class Assembly:
    """Assembles frames to messages. One thread adds; another may call :meth:`recycle`."""

    def __init__(self, max_message_bytes: int) -> None:
        self._most = max_message_bytes + max_message_bytes // 64 + _GRAIN  # memories are aligned
        self._large: _Large | None = None
        self._idle: deque[mmap.mmap] = deque(maxlen=_IDLE_MEMORIES)
        self.frames = 0
        """Data frames that have arrived."""
        self.arrived = 0
        """Messages that have wholly arrived."""

    def add(self, frame: First | Piece, unread: int = 0) -> tuple[QueueMessage, mmap.mmap | None] | None:
        """The message that ``frame`` completes, and the memory to recycle once it was read.

        ``unread``: bytes of the messages that have arrived and were not read.

        Raises:
            TransportError: messages are missing before it; says how many.
            ResourceExhaustedError: there is no memory for the message.
            CapacityError: with the unread ones it is more than this process can have.
            WireError: the frame does not continue the message, or announces more bytes than allowed.
        """
        self.frames += 1
        if isinstance(frame, Piece):
            return self._continue(frame)
        if self._large is not None:
            raise WireError(f"message {frame.number} came amid message {self._large.first.number}")
        if frame.number != self.arrived:
            lost = frame.number - self.arrived
            if lost < 0:
                raise WireError(f"message {frame.number} came twice")
            raise TransportError(
                f"{lost} message{'' if lost == 1 else 's'} from the writer, from number {self.arrived} on,"
                " were lost on the network"
            )
        nbytes = frame.head_bytes + frame.body_bytes
        if nbytes > self._most:
            raise WireError(f"a message of {nbytes} bytes was announced; at most {self._most} are accepted")
        MessageLimit().check_size(
            unread + nbytes, "what has arrived and was not read, with the next message,"
        )
        if frame.payload.nbytes == nbytes:
            self.arrived += 1
            payload = frame.payload.toreadonly()
            return QueueMessage(frame.raw, payload[: frame.head_bytes], payload[frame.head_bytes :]), None
        if frame.payload.nbytes:
            raise WireError(f"{frame.payload.nbytes} of {nbytes} bytes came with the beginning of a message")
        self._large = _Large(frame, self._memory(nbytes))
        return None

    def _continue(self, piece: Piece) -> tuple[QueueMessage, mmap.mmap] | None:
        large = self._large
        if (
            large is None
            or (piece.number, piece.offset) != (large.first.number, large.arrived)
            or not 0 < piece.payload.nbytes <= large.nbytes - large.arrived
        ):
            raise WireError(f"a piece of message {piece.number} does not continue what has come")
        into(memoryview(large.memory), piece.offset, piece.payload)
        large.arrived += piece.payload.nbytes
        if large.arrived < large.nbytes:
            return None
        self._large = None
        self.arrived += 1
        whole = memoryview(large.memory).toreadonly()[: large.nbytes]
        head = large.first.head_bytes
        return QueueMessage(large.first.raw, whole[:head], whole[head:]), large.memory

    def recycle(self, memory: mmap.mmap) -> None:
        """Keep the memory for the next message."""
        self._idle.append(memory)

    def _memory(self, nbytes: int) -> mmap.mmap:
        while self._idle:
            memory = self._idle.popleft()
            if nbytes <= len(memory):
                return memory
        size = -(-nbytes // _GRAIN) * _GRAIN
        try:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as e:
            NamedExhaustion.check(e, f"receiving a message of {nbytes} bytes")
            raise WireError(f"there is no memory for a message of {nbytes} bytes: {e}") from e
