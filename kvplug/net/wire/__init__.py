"""Encodes values as bytes and decodes them, within bounds and without running anything that was received.

The main modules are :mod:`~kvplug.net.wire.frames` (the 16-byte header before every message),
:mod:`~kvplug.net.wire.values` (a closed list of plain values, with their tensors' bytes in or out of band),
:mod:`~kvplug.net.wire.validate` (the checks before anything is built), :mod:`~kvplug.net.wire.records`
(messages as attrs classes), :mod:`~kvplug.net.wire.tensors` (tensors' metadata, and their bytes without a
copy). ``docs/reference/wire.md`` specifies the formats.
"""

from kvplug.net.wire.frames import HEADER_SIZE, FrameHeader, FrameKind, decode_header, encode_header
from kvplug.net.wire.records import from_plain, to_plain
from kvplug.net.wire.tensors import (
    TensorMeta,
    copy_into,
    decode_meta,
    empty_like_meta,
    encode_meta,
    memory_of,
    memory_of_writable,
    meta_of,
    split_meta,
)
from kvplug.net.wire.validate import DEFAULT_LIMITS, Limits
from kvplug.net.wire.values import (
    ALIGNMENT,
    OutOfBand,
    aligned,
    decode,
    decode_out_of_band,
    encode,
    encode_out_of_band,
)

__all__ = [
    "ALIGNMENT",
    "DEFAULT_LIMITS",
    "HEADER_SIZE",
    "FrameKind",
    "FrameHeader",
    "Limits",
    "OutOfBand",
    "TensorMeta",
    "aligned",
    "copy_into",
    "decode",
    "decode_out_of_band",
    "decode_header",
    "decode_meta",
    "empty_like_meta",
    "encode",
    "encode_out_of_band",
    "encode_header",
    "encode_meta",
    "from_plain",
    "memory_of",
    "memory_of_writable",
    "meta_of",
    "split_meta",
    "to_plain",
]
