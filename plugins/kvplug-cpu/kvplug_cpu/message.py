"""The format of messages on the data connections of a pipe.

    connection 0:  header (16 bytes) | meta | tensor bytes, or the first part of them
    connection k:                             the k-th part of a split tensor

The header's length counts everything after it, on all connections. A tensor is split over all of them when
the header's flag says so; both ends compute the parts from its size and the number of connections. GOODBYE is
the last thing on connection 0 of a pipe that was closed politely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.net.wire.tensors import memory_of

if TYPE_CHECKING:
    from torch import Tensor

SPLIT = 1
"""Flag: the tensor's bytes are spread over all data connections."""
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
            return cls(NONE, _NOTHING, False)
        memory = memory_of(tensor)
        split = memory.nbytes >= split_bytes
        prefix = tensor_prefix(tensor.dtype, tensor.shape, memory.nbytes, SPLIT if split else 0)
        return cls(prefix, memory, split)


def parts(nbytes: int, count: int) -> list[tuple[int, int]]:
    """(start, stop) of each connection's part of a split tensor: whole pages, as even as possible."""
    share = -(-nbytes // (count * _PAGE)) * _PAGE
    return [(min(k * share, nbytes), min((k + 1) * share, nbytes)) for k in range(count)]
