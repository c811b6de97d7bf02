"""What the two ends send each other beside NCCL: small frames, each of which is checked before it is used.

    ANNOUNCE n   a message waits to be sent: in how many pieces, and its prefix, as in other pipes
    CLEAR n      its memory is ready, and its receive enqueued: send it. May repeat the prefix, to be compared
    TAKEN n      all of it has arrived
    HEARTBEAT    this end is alive
    GOODBYE      this end was closed, and the peer has taken all that it sent; nothing comes after it

Numbers count the messages of one direction, from 0.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import attrs

from kvplug.net.wire.messages import read_prefix
from kvplug.net.wire.tensors import TensorMeta
from kvplug.transport import WireError

WINDOW: Final = 64
"""How many messages may be announced and not taken: what a receiver that stops has to remember."""
MAX_PIECES: Final = 1024
_MAGIC: Final = b"KVN1"
_HEADER: Final = struct.Struct("<4sBxHQ")
_PIECES: Final = struct.Struct("<H")
_MAX_PAYLOAD_BYTES: Final = 1024


class FrameType(enum.IntEnum):
    ANNOUNCE = 1
    CLEAR = 2
    TAKEN = 3
    HEARTBEAT = 4
    GOODBYE = 5


@attrs.frozen
class Frame:
    type: FrameType
    number: int = 0
    payload: bytes = b""

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.type, len(self.payload), self.number) + self.payload


GOODBYE: Final = Frame(FrameType.GOODBYE).pack()


@attrs.frozen
class Announcement:
    """A message that is to come. ``meta`` is ``None`` where the message is."""

    number: int
    prefix: bytes
    meta: TensorMeta | None
    pieces: int = 1

    @property
    def nbytes(self) -> int:
        return 0 if self.meta is None else self.meta.nbytes

    def pack(self) -> bytes:
        return Frame(FrameType.ANNOUNCE, self.number, _PIECES.pack(self.pieces) + self.prefix).pack()

    @classmethod
    def unpack(cls, frame: Frame) -> Announcement:
        """Raises WireError: it contradicts itself. UnsupportedError: this end does not carry the dtype."""
        if len(frame.payload) < _PIECES.size:
            raise WireError("an announcement is cut short")
        (pieces,) = _PIECES.unpack_from(frame.payload)
        prefix = frame.payload[_PIECES.size :]
        parsed = read_prefix(prefix)
        if parsed.goodbye or parsed.flags:
            raise WireError("a frame that this pipe does not use")
        made = cls(frame.number, prefix, parsed.meta, pieces)
        if pieces != 1 and not (
            parsed.meta is not None
            and parsed.meta.shape
            and pieces == parsed.meta.shape[0] <= MAX_PIECES
            and made.nbytes
        ):
            raise WireError(f"a message of {made.nbytes} bytes in {pieces} pieces")
        return made


class FrameParser:
    """Cuts a stream into frames. It holds at most one that is not complete."""

    def __init__(self) -> None:
        self.held = bytearray()
        """The frame that is not complete yet."""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now.

        Raises:
            WireError: the bytes are not a frame.
        """
        self.held += data
        found, at = [], 0
        while len(self.held) - at >= _HEADER.size:
            magic, code, length, number = _HEADER.unpack_from(self.held, at)
            if magic != _MAGIC or length > _MAX_PAYLOAD_BYTES or code not in FrameType.__members__.values():
                raise WireError("what came is not a frame of the pipe 'pynccl'")
            if len(self.held) - at < _HEADER.size + length:
                break
            begin = at + _HEADER.size
            found.append(Frame(FrameType(code), number, bytes(self.held[begin : begin + length])))
            at = begin + length
        del self.held[:at]
        return found
