"""Bytes to things and back, bounded and without running anything that came in.

The modules are :mod:`~kvplug.net.wire.frames` (the 16-byte header before every message),
:mod:`~kvplug.net.wire.values` (a closed list of plain values), :mod:`~kvplug.net.wire.scan` (what must hold
of them before anything is built), :mod:`~kvplug.net.wire.apart` (the same values with their tensors' bytes
apart), :mod:`~kvplug.net.wire.tensors` (what a tensor's bytes mean, and those bytes without a copy). The
formats are written down in ``docs/reference/wire.md``.
"""

from kvplug.net.wire.apart import ALIGNMENT, Apart, aligned, decode_apart, encode_apart
from kvplug.net.wire.frames import HEADER_SIZE, FrameKind, Header, decode_header, encode_header
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
from kvplug.net.wire.values import DEFAULT_LIMITS, Limits, decode, encode

__all__ = [
    "ALIGNMENT",
    "Apart",
    "DEFAULT_LIMITS",
    "HEADER_SIZE",
    "FrameKind",
    "Header",
    "Limits",
    "TensorMeta",
    "aligned",
    "copy_into",
    "decode",
    "decode_apart",
    "decode_header",
    "decode_meta",
    "empty_like_meta",
    "encode",
    "encode_apart",
    "encode_header",
    "encode_meta",
    "memory_of",
    "memory_of_writable",
    "meta_of",
    "split_meta",
]
