"""Announcements of messages, read from checked copies, since the peer could change what lies in the ring."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from kvplug.net.wire.messages import SHORTEST_TENSOR_PREFIX, prefix_size, read_prefix
from kvplug.net.wire.tensors import TensorMeta, dtype_of
from kvplug.transport import WireError
from kvplug_shm.pipe.geometry import LINE

if TYPE_CHECKING:
    import torch


@functools.lru_cache(1024)
def small_in(line: bytes) -> tuple[TensorMeta | None, torch.dtype | None, int] | None:
    """The announcement in the first line of a message, if the whole prefix fits the line.

    Raises:
        WireError, UnsupportedError: it announces no message that can be received here.
    """
    # A pipe sees the same few shapes over and over.
    size = prefix_size(line[:SHORTEST_TENSOR_PREFIX])
    if size > LINE:
        return None
    meta = meta_in(line[:size])
    return meta, None if meta is None else dtype_of(meta.dtype), 0 if meta is None else meta.nbytes


def meta_in(prefix: bytes) -> TensorMeta | None:
    """The meta in a whole prefix; ``None`` for the message ``None``.

    Raises:
        WireError: it is not the prefix of a message of this pipe.
    """
    announcement = read_prefix(prefix)
    if announcement.goodbye or announcement.flags:
        raise WireError("a frame that this pipe does not use")
    return announcement.meta
