"""What the two ends send each other over their channel: frames, which are plain values.

inline     a whole message with its bytes
offer      a message whose bytes the receiver reads from the sender's memory
taken      the receiver has so many more messages: their memory is the sender's again
reading    the receiver reads and UCX needs the sender for it
heartbeat  this end is alive
goodbye    this end sends nothing more, and what it offered cannot be read any more
"""

from __future__ import annotations

import enum
import struct
from typing import Any, Final

import attrs

from kvplug import UnsupportedError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.messages import read_prefix
from kvplug.transport import WireError
from kvplug_nixl.agent import Span

MAX_MESSAGES: Final = 32
"""How many messages may be announced and not yet taken. It bounds what a receiver that stops has to store,
and with ``MAX_INLINE_BYTES`` fits the buffers of a connection."""
MAX_INLINE_BYTES: Final = 4096
MAX_SPANS: Final = 64
"""Of one offered message; one with more is gathered first."""
_SPAN: Final = struct.Struct("<QQQ")
_MAX_METADATA: Final = 8 << 20


class FrameKind(enum.StrEnum):
    INLINE = "inline"
    OFFER = "offer"
    TAKEN = "taken"
    READING = "reading"
    HEARTBEAT = "heartbeat"
    GOODBYE = "goodbye"


@attrs.frozen(eq=False)
class Inline:
    """A whole message."""

    meta: TensorMeta | None
    data: bytes


@attrs.frozen(eq=False)
class Offer:
    """Where the bytes of a message lie in the sender's memory."""

    meta: TensorMeta
    spans: tuple[Span, ...]
    device: int
    """The index of the GPU whose memory it is; -1: the host's."""
    metadata: bytes
    """What NIXL has to load first, if anything."""
    starts_anew: bool
    """The metadata replaces all that came before."""


def inline_frame(prefix: bytes, data: bytes) -> list[Any]:
    return [FrameKind.INLINE.value, prefix, data]


def offer_frame(
    prefix: bytes,
    spans: tuple[Span, ...],
    device: int,
    metadata: bytes,
    *,
    starts_anew: bool,
) -> list[Any]:
    packed = b"".join(_SPAN.pack(*span) for span in spans)
    return [FrameKind.OFFER.value, prefix, packed, device, metadata, starts_anew]


def decode(value: Any) -> tuple[FrameKind, Any]:
    """The kind of a frame, and its content: an :class:`Inline`, an :class:`Offer`, how many were taken, or
    ``None``.

    Raises:
        WireError: it is no frame of this pipe.
    """
    match value:
        case [FrameKind.INLINE, bytes(prefix), bytes(data)]:
            meta = _meta_of(prefix)
            if len(data) != (0 if meta is None else meta.nbytes) or len(data) > MAX_INLINE_BYTES:
                raise WireError(f"an inline message of {len(data)} bytes, which it cannot have")
            return FrameKind.INLINE, Inline(meta, data)
        case [FrameKind.OFFER, bytes(prefix), bytes(spans), int(device), bytes(metadata), bool(anew)]:
            if not -1 <= device < 1 << 16 or len(metadata) > _MAX_METADATA:
                raise WireError("it offers memory of a device that cannot be, or with too long a text")
            offered = _meta_of(prefix)
            return FrameKind.OFFER, Offer(offered, _spans_of(spans, offered), device, metadata, anew)  # type: ignore[arg-type]
        case [FrameKind.TAKEN, int(count)] if count > 0:
            return FrameKind.TAKEN, count
        case [FrameKind.READING | FrameKind.HEARTBEAT | FrameKind.GOODBYE as name]:
            return FrameKind(name), None
    raise WireError("it is no frame of the pipe 'nixl'")


def _spans_of(packed: bytes, meta: TensorMeta | None) -> tuple[Span, ...]:
    if len(packed) % _SPAN.size or not 0 < len(packed) <= MAX_SPANS * _SPAN.size:
        raise WireError("it offers memory in spans that cannot be")
    spans = tuple(_SPAN.iter_unpack(packed))
    if meta is None or sum(length for _, length, _ in spans) != meta.nbytes or not meta.nbytes:
        raise WireError("it offers another number of bytes than it announces")
    if any(not length or not address or address + length >= 1 << 63 for address, length, _ in spans):
        raise WireError("it offers memory that cannot be")
    return spans


def _meta_of(prefix: bytes) -> TensorMeta | None:
    try:
        announcement = read_prefix(prefix)
    except UnsupportedError as e:
        raise WireError(str(e)) from e
    if announcement.goodbye or announcement.flags:
        raise WireError("a prefix that this pipe does not use")
    return announcement.meta
