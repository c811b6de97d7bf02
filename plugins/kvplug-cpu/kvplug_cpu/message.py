"""What a pipe puts on its lanes.

    lane 0:  header (16 bytes) | meta | tensor bytes, or the first part of them
    lane k:                             the k-th part of a split tensor

The header's length counts everything after it, on all lanes. A tensor is split over all lanes when the
header's flag says so; both ends compute the parts from its size and the number of lanes. ``None`` has
neither meta nor bytes. GOODBYE is the last thing on lane 0 of a pipe that was closed politely.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs

from kvplug import WireError
from kvplug.wire.frames import HEADER_SIZE, FrameKind, decode_header, encode_header
from kvplug.wire.tensors import (
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
    from torch import Tensor

SPLIT = 1
"""Flag: the tensor's bytes are spread over all lanes."""
MAX_LENGTH = 2**56
"""A bound on what a header may claim; memory is only taken when somebody calls ``recv_tensor``."""
GOODBYE = encode_header(FrameKind.GOODBYE, 0)
_NONE = encode_header(FrameKind.NONE, 0)
SHORTEST_TENSOR_PREFIX = HEADER_SIZE + META_PREFIX_SIZE
_NOTHING = memoryview(b"")
_PAGE = 4096


@attrs.frozen
class Content:
    """A message ready to be sent: the bytes that announce it, and the tensor's memory (kept alive)."""

    prefix: bytes
    memory: memoryview
    split: bool

    @classmethod
    def of(cls, tensor: Tensor | None, split_bytes: int) -> Content:
        """From any CPU tensor; a non-contiguous one is copied. Split from ``split_bytes`` up.

        Raises:
            UnsupportedError: a device, layout or dtype that is not carried.
        """
        if tensor is None:
            return cls(_NONE, _NOTHING, False)
        memory = memory_of(tensor)
        split = memory.nbytes >= split_bytes
        return cls(_announce(tensor.dtype, tensor.shape, memory.nbytes, split), memory, split)


@functools.lru_cache(1024)
def _announce(dtype: torch.dtype, shape: torch.Size, nbytes: int, split: bool) -> bytes:
    # A pipe sees the same few shapes over and over.
    meta = encode_meta(TensorMeta(dtype_name(dtype), tuple(shape)))
    return encode_header(FrameKind.TENSOR, len(meta) + nbytes, SPLIT if split else 0) + meta


@attrs.frozen
class Announcement:
    """What a prefix says: a tensor's meta, or ``None``, and how the bytes after it lie on the lanes."""

    meta: TensorMeta | None
    split: bool = False
    goodbye: bool = False


@functools.lru_cache(1024)
def prefix_size(start: bytes) -> int:
    """How many bytes a prefix has, from its first ``SHORTEST_TENSOR_PREFIX`` or, if fewer came, 16.

    Raises:
        WireError: it is not a message of a pipe.
    """
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
    """What a whole prefix says.

    Raises:
        WireError: it contradicts itself.
    """
    header = decode_header(prefix, max_length=MAX_LENGTH)
    if header.kind != FrameKind.TENSOR:
        return Announcement(None, goodbye=header.kind == FrameKind.GOODBYE)
    meta = decode_meta(prefix[HEADER_SIZE:])
    if header.length != len(prefix) - HEADER_SIZE + meta.nbytes:
        raise WireError(f"a tensor of {meta.nbytes} bytes in a frame of {header.length}")
    return Announcement(meta, bool(header.flags & SPLIT))


def parts(nbytes: int, lanes: int) -> list[tuple[int, int]]:
    """(start, stop) of each lane's part of a split tensor: whole pages, as even as they come."""
    share = -(-nbytes // (lanes * _PAGE)) * _PAGE
    return [(min(k * share, nbytes), min((k + 1) * share, nbytes)) for k in range(lanes)]
