"""The frames between the two ends of a queue's network half.

Each frame is one ZeroMQ message of one part or two: a header that begins with its kind, and a payload that
follows in the same part, or is the second one. Numbers are little-endian. Messages are numbered from 0, as in
the ring.

========  =========  ===================================================================================
kind      from       header after the kind, and payload
========  =========  ===================================================================================
JOIN      reader     a value: version, identity, silence that counts as its death
TAKEN     reader     data frames that have arrived, messages that have arrived whole, messages read
READY     both       (all of them, from the writer)
BEAT      both
LEAVE     reader
WELCOME   writer     a value: version, identity, silence that counts as death, number of messages
REFUSED   writer     a value: why
MESSAGE   writer     raw or a value, number, bytes of head and of body; the first bytes of both
PIECE     writer     number, offset; bytes from there on
GOODBYE   writer     how many messages there were; it answers LEAVE, too
EVICTED   writer     how many messages there are, how many the reader will not get; why, as text
========  =========  ===================================================================================
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import zmq

from kvplug.net.wire import Limits, decode, encode
from kvplug.transport import WireError, peer_text
from kvplug_shm.queue.network import QueueMessage

VERSION: Final = 1
PIECE_BYTES: Final = 1 << 20
"""Payload of one frame. A larger message is sent in pieces, so that both ends work at the same time."""
MAX_TO_READER: Final = PIECE_BYTES + 4096
"""The most bytes of a frame's part that a reader accepts."""
MAX_TO_WRITER: Final = 4096
_JOINED_BYTES: Final = 64 << 10
"""A payload up to here is copied behind its header: a part of its own costs more."""
_LIMITS = Limits(max_bytes=2048, max_depth=4, max_items=64)


class QueueFrameKind(enum.IntEnum):
    """First byte of every frame."""

    JOIN = 1
    TAKEN = 2
    READY = 3
    BEAT = 4
    LEAVE = 5
    WELCOME = 16
    REFUSED = 17
    MESSAGE = 18
    PIECE = 19
    GOODBYE = 20
    EVICTED = 21


_KINDS = {int(kind): kind for kind in QueueFrameKind}
_MESSAGE = struct.Struct("<BB6xQQQ")
_PIECE = struct.Struct("<B7xQQ")
_TAKEN = struct.Struct("<B7xQQQ")
_GOODBYE = struct.Struct("<B7xQ")
_EVICTED = struct.Struct("<B7xQQ")

Part: TypeAlias = "bytes | memoryview | zmq.Frame"


class Plain(NamedTuple):
    """READY, BEAT, LEAVE; JOIN, WELCOME, REFUSED with their value."""

    kind: QueueFrameKind
    value: Any = None


class Taken(NamedTuple):
    frames: int
    arrived: int
    read: int


class First(NamedTuple):
    """MESSAGE."""

    raw: bool
    number: int
    head_bytes: int
    body_bytes: int
    payload: memoryview


class Piece(NamedTuple):
    number: int
    offset: int
    payload: memoryview


class Over(NamedTuple):
    """GOODBYE, and EVICTED with its reason."""

    total: int
    lost: int = 0
    why: str = ""


Frame = Plain | Taken | First | Piece | Over


def plain(kind: QueueFrameKind, value: object = None) -> bytes:
    return bytes([kind]) + (b"" if value is None else encode(value, limits=_LIMITS))


def taken(frames: int, arrived: int, read: int) -> bytes:
    return _TAKEN.pack(QueueFrameKind.TAKEN, frames, arrived, read)


def goodbye(total: int) -> bytes:
    return _GOODBYE.pack(QueueFrameKind.GOODBYE, total)


def evicted(total: int, lost: int, why: str) -> bytes:
    return _EVICTED.pack(QueueFrameKind.EVICTED, total, lost) + why.encode("utf-8", "replace")[:500]


def frames_of(message: QueueMessage, number: int) -> Iterator[tuple[list[Part], bool]]:
    """The frames of one message, each with whether it is the last. Each frame's bytes are copied when it is
    generated."""
    head, body = memoryview(message.head), message.body
    first = _MESSAGE.pack(QueueFrameKind.MESSAGE, message.raw, number, head.nbytes, body.nbytes)
    nbytes = head.nbytes + body.nbytes
    if nbytes <= _JOINED_BYTES:
        yield [b"".join((first, head, body))], True
        return
    yield [first], False
    for base, part in ((0, head), (head.nbytes, body)):
        for at in range(0, part.nbytes, PIECE_BYTES):
            header = _PIECE.pack(QueueFrameKind.PIECE, number, base + at)
            piece = part[at : at + PIECE_BYTES]
            yield [header, zmq.Frame(piece, copy=True)], base + at + piece.nbytes == nbytes


def read(parts: Sequence[memoryview]) -> Frame:
    """Parse the parts of a frame.

    Raises:
        WireError: they are no frame. No other error, whatever the bytes.
    """
    if not 1 <= len(parts) <= 2 or not parts[0].nbytes:
        raise WireError(f"a frame of {len(parts)} parts came over the network of a queue")
    header = parts[0]
    kind = _KINDS.get(header[0])
    try:
        match kind:
            case QueueFrameKind.MESSAGE:
                _, raw, number, head_bytes, body_bytes = _MESSAGE.unpack_from(header)
                return First(bool(raw), number, head_bytes, body_bytes, _payload(parts, _MESSAGE))
            case QueueFrameKind.PIECE:
                _, number, offset = _PIECE.unpack_from(header)
                return Piece(number, offset, _payload(parts, _PIECE))
            case QueueFrameKind.TAKEN:
                return Taken(*_TAKEN.unpack(header)[1:])
            case QueueFrameKind.GOODBYE:
                return Over(_GOODBYE.unpack(header)[1])
            case QueueFrameKind.EVICTED:
                _, total, lost = _EVICTED.unpack_from(header)
                return Over(total, lost, peer_text(bytes(header[_EVICTED.size :]).decode("utf-8", "replace")))
            case QueueFrameKind.JOIN | QueueFrameKind.WELCOME | QueueFrameKind.REFUSED:
                return Plain(kind, decode(header[1:], limits=_LIMITS))
            case QueueFrameKind.READY | QueueFrameKind.BEAT | QueueFrameKind.LEAVE:
                return Plain(kind)
    except struct.error as e:
        raise WireError(
            f"a frame of the kind {QueueFrameKind(header[0]).name} has {header.nbytes} bytes: {e}"
        ) from e
    raise WireError(f"a frame of the unknown kind {header[0]} came over the network of a queue")


def _payload(parts: Sequence[memoryview], header: struct.Struct) -> memoryview:
    return parts[1] if len(parts) == 2 else parts[0][header.size :]
