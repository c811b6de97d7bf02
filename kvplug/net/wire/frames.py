"""The header before every message: 16 bytes, little-endian.

======  ====  =====================================================================
offset  size  field
======  ====  =====================================================================
0       4     magic, ``b"KVPG"``
4       1     major version; both ends must have the same
5       1     minor version; both ends use the lower of the two
6       1     kind, see :class:`FrameKind`
7       1     flags, whose meaning depends on the kind
8       8     length of the payload that follows, in bytes
======  ====  =====================================================================
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import attrs

from kvplug.errors import WireError

MAGIC: Final = b"KVPG"
MAJOR: Final = 1
"""Changes when an old reader would misunderstand a new writer."""
MINOR: Final = 0
"""Increases with each addition. An addition is sent only if both ends agreed on it."""

_HEADER = struct.Struct("<4sBBBBQ")
HEADER_SIZE: Final = _HEADER.size
"""Bytes of a frame's header."""


class FrameKind(enum.IntEnum):
    """The kind of the payload."""

    VALUE = 1
    """One value, see :mod:`kvplug.net.wire.values`."""
    TENSOR = 2
    """A tensor's meta, then its bytes in row-major order, see :mod:`kvplug.net.wire.tensors`."""
    NONE = 3
    """The message ``None`` of a pipe. No payload."""
    GOODBYE = 5
    """The sender has closed politely and sends nothing more. No payload."""
    LACK = 6
    """The sender's process ran out of a resource. The payload is a value: the resource, and the reason in
    words."""


_KINDS = {int(kind): kind for kind in FrameKind}


@attrs.frozen
class FrameHeader:
    """A decoded header, already checked against the reader's bounds."""

    kind: FrameKind
    """What the payload is."""
    length: int
    """Bytes of payload that follow."""
    flags: int
    """Eight bits, whose meaning depends on the kind."""
    minor: int
    """Minor version of the sender."""


def encode_header(kind: FrameKind, length: int, flags: int = 0) -> bytes:
    """Return the 16-byte header of a payload of ``length`` bytes.

    Raises:
        ValueError: ``length`` or ``flags`` does not fit its field (a bug of the caller).
    """
    if not (0 <= length < 1 << 64 and 0 <= flags < 256):
        raise ValueError(f"length {length} or flags {flags} does not fit a frame's header")
    return _HEADER.pack(MAGIC, MAJOR, MINOR, kind, flags, length)


def decode_header(buf: bytes | bytearray | memoryview, *, max_length: int) -> FrameHeader:
    """Decode and check the first 16 bytes of ``buf``; later bytes are ignored.

    Raises:
        WireError: the header is too short, not kvplug's, of another major version or of an unknown kind, or
            its payload has more than ``max_length`` bytes. The message names the field, its value and the
            allowed values.
    """
    try:
        magic, major, minor, kind, flags, length = _HEADER.unpack_from(buf)
    except (struct.error, TypeError, BufferError) as e:
        raise WireError(f"a frame's header is {HEADER_SIZE} bytes: {e}") from e
    if magic != MAGIC:
        raise WireError(f"not a kvplug frame: it starts with {magic!r} instead of {MAGIC!r}")
    if major != MAJOR:
        raise WireError(
            f"the peer uses wire version {major}.{minor}, and this end {MAJOR}.{MINOR};"
            " the major versions must be equal, so upgrade the older end"
        )
    known = _KINDS.get(kind)
    if known is None:
        raise WireError(
            f"unknown frame kind {kind}; known are {', '.join(f'{k} ({k.name})' for k in FrameKind)}"
        )
    if length > max_length:
        raise WireError(f"a {known.name} frame claims {length} bytes, but at most {max_length} are accepted")
    return FrameHeader(known, length, flags, minor)
