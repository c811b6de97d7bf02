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
    try:
        name, *rest = value
        kind = FrameKind(name)
    except (TypeError, ValueError) as e:
        raise WireError("it is no frame of the pipe 'cuda-ipc'") from e
    if kind is FrameKind.PIECE and len(rest) == 3:
        prefix, offset, nbytes = rest
        if isinstance(prefix, bytes) and _is_count(offset) and _is_count(nbytes):
            return kind, Piece(prefix, offset, nbytes)
    elif kind is FrameKind.TAKEN and len(rest) == 1 and _is_count(rest[0]):
        return kind, rest[0]
    elif kind not in (FrameKind.PIECE, FrameKind.TAKEN) and not rest:
        return kind, None
    raise WireError(f"its frame {kind.value!r} has the wrong content")


def meta_of_prefix(prefix: bytes) -> TensorMeta | None:
    """The tensor that a prefix announces; ``None``: the message is ``None``. Raises WireError."""
    try:
        announcement = read_prefix(prefix)
    except UnsupportedError as e:
        raise WireError(str(e)) from e
    if announcement.goodbye or announcement.flags:
        raise WireError("a prefix that this pipe does not use")
    return announcement.meta


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
