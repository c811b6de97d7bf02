"""What the peer says about a message before its bytes: checked copies of what lies in the ring."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Final

from kvplug.net.wire.messages import SHORTEST_TENSOR_PREFIX, prefix_size, read_prefix
from kvplug.net.wire.tensors import TensorMeta, dtype_of
from kvplug.transport import WireError
from kvplug_shm.pipe.rings import LINE

if TYPE_CHECKING:
    import torch

OFFERED: Final = 1
"""The flag of a prefix: not the tensor comes after it, but a line that says where it lies in the sender."""
_ADDRESS: Final = struct.Struct("<Q")


@functools.lru_cache(1024)
def small_in(line: bytes) -> tuple[TensorMeta | None, torch.dtype | None, int] | None:
    """What the first line of a message says, if its prefix is no longer and its bytes come after it.

    Raises:
        WireError, UnsupportedError: it is no message that can be received here.
    """
    # A pipe sees the same few shapes over and over.
    size = prefix_size(line[:SHORTEST_TENSOR_PREFIX])
    if size > LINE:
        return None
    meta, offered = meta_in(line[:size])
    if offered:
        return None
    return meta, None if meta is None else dtype_of(meta.dtype), 0 if meta is None else meta.nbytes


def meta_in(prefix: bytes) -> tuple[TensorMeta | None, bool]:
    """What a whole prefix says, and whether the tensor is only offered.

    Raises:
        WireError: it is none of a message of this pipe.
    """
    announcement = read_prefix(prefix)
    meta, flags = announcement.meta, announcement.flags
    if announcement.goodbye or flags & ~OFFERED or (flags and (meta is None or not meta.nbytes)):
        raise WireError("a frame that this pipe does not use")
    return meta, bool(flags)


def address_in(line: bytes) -> int:
    """Where an offered tensor lies. Raises WireError if none can lie there."""
    (address,) = _ADDRESS.unpack_from(line)
    if not 0 < address < 2**63:
        raise WireError("a tensor that is offered at an address where none can be")
    return address


def address_line(address: int) -> bytes:
    """What goes into the ring for it."""
    return _ADDRESS.pack(address).ljust(LINE, b"\0")
