"""A pipe that flips bits of the KV that it sends, for ``kvplug demo --corrupt``.

As a program it is a worker of an engine of several workers, with such pipes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvplug.transport import Pipe, Timeout, Transfer

if TYPE_CHECKING:
    from torch import Tensor

_FLIPPED_BYTES: Final = 1024
"""Flipped bits per tensor of KV: enough to change the text if integrity is off."""
_BIT: Final = 1 << 4
"""A bit of a float's upper byte: multiplies or divides it by four billion, and a float16 by 16."""
_SIGNAL_BYTES: Final = 10 << 10
"""A smaller message is not KV, for example the ids of a thousand tokens, and is not corrupted."""


class CorruptingPipe(Pipe):
    """A pipe around another one."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    @property
    def peer(self) -> str:
        return self._pipe.peer

    def path_report(self) -> Pipe.PathReport:
        return self._pipe.path_report()

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        return self._pipe.send_tensor(_corrupted(tensor), timeout=timeout)

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        return self._pipe.recv_tensor(out, timeout=timeout)

    def limit_messages(self, nbytes: int) -> None:
        self._pipe.limit_messages(nbytes)

    def _close(self, timeout: Timeout) -> None:
        self._pipe.close(timeout)

    def _abort(self) -> None:
        self._pipe.abort()


def _corrupted(tensor: Tensor | None) -> Tensor | None:
    """A copy with one bit flipped in some bytes; a small tensor unchanged."""
    import torch

    if tensor is None or tensor.nbytes < _SIGNAL_BYTES:
        return tensor
    copy = tensor.contiguous().clone()
    octets = copy.view(-1).view(torch.uint8)
    octets[torch.randint(len(octets), (_FLIPPED_BYTES,), device=copy.device)] ^= _BIT
    return copy


if __name__ == "__main__":
    from kvplug_transformers.engine.rank import main

    main(CorruptingPipe)
