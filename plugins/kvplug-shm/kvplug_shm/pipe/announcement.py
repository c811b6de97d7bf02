"""What the peer says about a message before its bytes: checked copies of what lies in the ring."""

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
    """What the first line of a message says, if its prefix is no longer and its bytes come after it.

    Raises:
        WireError, UnsupportedError: it is no message that can be received here.
    """
    # A pipe sees the same few shapes over and over.
    size = prefix_size(line[:SHORTEST_TENSOR_PREFIX])
    if size > LINE:
        return None
    meta = meta_in(line[:size])
    return meta, None if meta is None else dtype_of(meta.dtype), 0 if meta is None else meta.nbytes


def meta_in(prefix: bytes) -> TensorMeta | None:
    """What a whole prefix says: the meta of a tensor, or of ``None`` none.

    Raises:
        WireError: it is none of a message of this pipe.
    """
    announcement = read_prefix(prefix)
    if announcement.goodbye or announcement.flags:
        raise WireError("a frame that this pipe does not use")
    return announcement.meta
