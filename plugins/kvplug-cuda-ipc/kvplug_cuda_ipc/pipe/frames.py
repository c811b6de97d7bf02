"""What the two ends send each other over their channel: frames, which are plain values.

piece      bytes of a message lie in the sender's memory; the first piece of a message also carries the
           prefix that announces the message
taken      the receiver has copied so many pieces: their room may be used again
heartbeat  this end is alive
goodbye    this end sends nothing more and takes nothing more
unmapped   this end has unmapped the other's memory; the last frame
"""

from __future__ import annotations

import enum
from typing import Any, Final

import attrs

from kvplug import UnsupportedError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.messages import read_prefix
from kvplug.transport import WireError

MAX_PIECES: Final = 64
"""How many pieces may be announced and not yet taken. It bounds what a receiver that stops has to store."""


class FrameKind(enum.StrEnum):
    PIECE = "piece"
    TAKEN = "taken"
    HEARTBEAT = "heartbeat"
    GOODBYE = "goodbye"
    UNMAPPED = "unmapped"


@attrs.frozen
class Piece:
    """Bytes of a message in the sender's memory. ``prefix`` is empty except for a message's first piece."""

    prefix: bytes
    offset: int
    nbytes: int


def encode(kind: FrameKind, content: Piece | int | None = None) -> list[Any]:
    """The frame as a value of a channel. ``content`` is a piece, or how many were taken."""
    if isinstance(content, Piece):
        return [kind.value, content.prefix, content.offset, content.nbytes]
    return [kind.value] if content is None else [kind.value, content]


def decode(value: Any) -> tuple[FrameKind, Any]:
    """The kind of a frame, and its content: a :class:`Piece`, how many pieces were taken, or ``None``.

    Raises:
        WireError: it is no frame of this pipe.
    """
    match value:
        case [FrameKind.PIECE, bytes(prefix), int(offset), int(nbytes)] if min(offset, nbytes) >= 0:
            return FrameKind.PIECE, Piece(prefix, offset, nbytes)
        case [FrameKind.TAKEN, int(count)] if count >= 0:
            return FrameKind.TAKEN, count
        case [FrameKind.HEARTBEAT | FrameKind.GOODBYE | FrameKind.UNMAPPED as name]:
            return FrameKind(name), None
    raise WireError("it is no frame of the pipe 'cuda-ipc'")


def meta_of_prefix(prefix: bytes) -> TensorMeta | None:
    """The tensor that a prefix announces; ``None``: the message is ``None``. Raises WireError."""
    try:
        announcement = read_prefix(prefix)
    except UnsupportedError as e:
        raise WireError(str(e)) from e
    if announcement.goodbye or announcement.flags:
        raise WireError("a prefix that this pipe does not use")
    return announcement.meta
