"""The prefix that a pipe sends before a tensor's bytes, wherever it puts the bytes.

    header (16 bytes) | meta

The header's length counts everything after the header. ``None`` has neither meta nor bytes. GOODBYE is the
last frame of a politely closed pipe whose connection does not itself signal the close.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import attrs

from kvplug.errors import WireError
from kvplug.net.wire.frames import HEADER_SIZE, FrameKind, decode_header, encode_header
from kvplug.net.wire.tensors import (
    META_PREFIX_SIZE,
    TensorMeta,
    decode_meta,
    dtype_name,
    encode_meta,
    memory_of,
    meta_size,
)

if TYPE_CHECKING:
    import torch

MAX_LENGTH: Final = 2**56
"""A bound on the length in a header. Memory is only allocated when ``recv_tensor`` is called."""
GOODBYE: Final = encode_header(FrameKind.GOODBYE, 0)
NONE: Final = encode_header(FrameKind.NONE, 0)
"""The whole message ``None``."""
SHORTEST_TENSOR_PREFIX: Final = HEADER_SIZE + META_PREFIX_SIZE


@functools.lru_cache(1024)
def tensor_prefix(dtype: torch.dtype, shape: torch.Size, nbytes: int, flags: int = 0) -> bytes:
    """Return the prefix of a tensor of ``nbytes`` bytes; ``flags`` are the transport's.

    Raises:
        UnsupportedError: the dtype is not supported.
    """
    # A pipe sees the same few shapes over and over.
    meta = encode_meta(TensorMeta(dtype_name(dtype), tuple(shape)))
    return encode_header(FrameKind.TENSOR, len(meta) + nbytes, flags) + meta


def message_parts(tensor: torch.Tensor | None) -> list[memoryview]:
    """Return the parts of a message in sending order: the prefix, and the bytes of a CPU tensor.

    Raises:
        UnsupportedError: as :func:`~kvplug.net.wire.tensors.memory_of`, which also documents when bytes
            are copied.
    """
    if tensor is None:
        return [memoryview(NONE)]
    memory = memory_of(tensor)
    return [memoryview(tensor_prefix(tensor.dtype, tensor.shape, len(memory))), memory]


@attrs.frozen
class Announcement:
    """A decoded prefix: a tensor's meta, or ``None``, and the transport's flags."""

    meta: TensorMeta | None
    flags: int = 0
    goodbye: bool = False


@functools.lru_cache(1024)
def prefix_size(start: bytes) -> int:
    """Return a prefix's size in bytes, from its first bytes, ``start``.

    The result is the whole size if ``start`` has at least ``SHORTEST_TENSOR_PREFIX`` bytes. Otherwise it is
    the number of bytes to pass to the next call, which may be the whole prefix.

    Raises:
        WireError: these are not the first bytes of a pipe's message.
    """
    if len(start) < HEADER_SIZE:
        return HEADER_SIZE
    header = decode_header(start, max_length=MAX_LENGTH)
    if header.kind in (FrameKind.NONE, FrameKind.GOODBYE):
        return HEADER_SIZE
    if header.kind != FrameKind.TENSOR:
        raise WireError(f"a frame of kind {header.kind.name} in a pipe")
    if len(start) < SHORTEST_TENSOR_PREFIX:
        return SHORTEST_TENSOR_PREFIX
    return HEADER_SIZE + meta_size(start[HEADER_SIZE:])


@functools.lru_cache(1024)
def read_prefix(prefix: bytes) -> Announcement:
    """Decode a whole prefix.

    Raises:
        WireError: its fields contradict each other.
    """
    header = decode_header(prefix, max_length=MAX_LENGTH)
    if header.kind != FrameKind.TENSOR:
        if header.length:
            raise WireError(f"a {header.kind.name} frame of {header.length} bytes; it has no payload")
        return Announcement(None, header.flags, header.kind == FrameKind.GOODBYE)
    meta = decode_meta(prefix[HEADER_SIZE:])
    if header.length != len(prefix) - HEADER_SIZE + meta.nbytes:
        raise WireError(f"a tensor of {meta.nbytes} bytes in a frame of {header.length}")
    return Announcement(meta, header.flags)
