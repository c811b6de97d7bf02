"""A pipe that flips bits: what a faulty cable, driver or memory bank does to a transfer.

The wrapper sits around the sending end of a real pipe, so the bits flip after the connector has hashed what
it gathered and before the receiver verifies what it got.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvplug.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.pipe import Pipe, Transfer

if TYPE_CHECKING:
    from torch import Tensor

_MAX_FLIPS = 4096


class CorruptingPipe(Pipe):
    """Sends changed copies of tensors; receives what came. Everything else is the wrapped pipe's."""

    def __init__(
        self,
        pipe: Pipe,
        *,
        seed: int = 0,
        min_bytes: int = 4096,
        spacing_bytes: int = 64,
        which: Callable[[int], bool] = lambda number: True,
    ) -> None:
        """Flip about one bit in ``spacing_bytes`` bytes of every tensor of at least ``min_bytes``.

        Smaller ones, the signals between two ends, are left alone. ``which`` is asked with the number of
        the large tensor, from 0. The same seed flips the same bits; at most 4096 in one tensor.
        """
        self._pipe = pipe
        self._random = random.Random(seed)
        self._min_bytes = min_bytes
        self._spacing_bytes = spacing_bytes
        self._which = which
        self._number = 0
        self.corrupted = 0
        """Tensors changed so far."""

    def __repr__(self) -> str:
        return f"<CorruptingPipe around {self._pipe!r}, {self.corrupted} tensors changed>"

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    @property
    def peer(self) -> str:
        return self._pipe.peer

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        if tensor is not None and tensor.numel() * tensor.element_size() >= self._min_bytes:
            number, self._number = self._number, self._number + 1
            if self._which(number):
                tensor = self._changed(tensor)
                self.corrupted += 1
        return self._pipe.send_tensor(tensor, timeout=timeout)

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        return self._pipe.recv_tensor(out, timeout=timeout)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._pipe.close(timeout)

    def abort(self) -> None:
        self._pipe.abort()

    def _changed(self, tensor: Tensor) -> Tensor:
        from kvplug.wire.tensors import empty_like_meta, memory_of, memory_of_writable, meta_of

        copy = empty_like_meta(meta_of(tensor))
        memory = memory_of_writable(copy)
        memory[:] = memory_of(tensor.cpu())
        step = max(self._spacing_bytes, -(-len(memory) // _MAX_FLIPS))
        for start in range(0, len(memory), step):
            at = start + self._random.randrange(min(step, len(memory) - start))
            memory[at] ^= 1 << self._random.randrange(8)
        return copy.to(tensor.device)
