"""What the two ends say to each other beside NCCL: small frames, each of which is checked before it counts.

    ANNOUNCE n   a message waits to be sent: in how many pieces, and its prefix, as other pipes have it
    CLEAR n      its memory is ready, and its receive enqueued: send it. May repeat the prefix, to be compared
    TAKEN n      all of it has arrived
    BEAT         nothing; says that this end is alive

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
MOST_PIECES: Final = 1024
_MAGIC: Final = b"KVN1"
_HEAD: Final = struct.Struct("<4sBxHQ")
_PIECES: Final = struct.Struct("<H")
_LONGEST: Final = 1024


class Kind(enum.IntEnum):
    ANNOUNCE = 1
    CLEAR = 2
    TAKEN = 3
    BEAT = 4


@attrs.frozen
class Frame:
    kind: Kind
    number: int = 0
    payload: bytes = b""

    def pack(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.kind, len(self.payload), self.number) + self.payload


@attrs.frozen
class Announcement:
    """What is to come: ``None`` where there is no meta."""

    number: int
    prefix: bytes
    meta: TensorMeta | None
    pieces: int = 1

    @property
    def nbytes(self) -> int:
        return 0 if self.meta is None else self.meta.nbytes

    def pack(self) -> bytes:
        return Frame(Kind.ANNOUNCE, self.number, _PIECES.pack(self.pieces) + self.prefix).pack()

    @classmethod
    def read(cls, frame: Frame) -> Announcement:
        """Raises WireError: it contradicts itself. UnsupportedError: a dtype that is not carried."""
        if len(frame.payload) < _PIECES.size:
            raise WireError("an announcement is cut short")
        (pieces,) = _PIECES.unpack_from(frame.payload)
        prefix = frame.payload[_PIECES.size :]
        said = read_prefix(prefix)
        if said.goodbye or said.flags:
            raise WireError("a frame that this pipe does not use")
        made = cls(frame.number, prefix, said.meta, pieces)
        if pieces != 1 and not (
            said.meta is not None
            and said.meta.shape
            and pieces == said.meta.shape[0] <= MOST_PIECES
            and made.nbytes
        ):
            raise WireError(f"a message of {made.nbytes} bytes in {pieces} pieces")
        return made


class Frames:
    """Cuts a stream into frames. At most one that is not whole is held."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now.

        Raises:
            WireError: these are none.
        """
        self._held += data
        found, at = [], 0
        while len(self._held) - at >= _HEAD.size:
            magic, code, length, number = _HEAD.unpack_from(self._held, at)
            if magic != _MAGIC or length > _LONGEST or code not in Kind.__members__.values():
                raise WireError("what came is no frame of the pipe 'pynccl'")
            if len(self._held) - at < _HEAD.size + length:
                break
            begin = at + _HEAD.size
            found.append(Frame(Kind(code), number, bytes(self._held[begin : begin + length])))
            at = begin + length
        del self._held[:at]
        return found
