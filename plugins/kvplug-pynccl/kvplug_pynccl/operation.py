"""What is under way on the device, step by step: nothing waits here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvplug_pynccl.device import Event, Stream
from kvplug_pynccl.watched import Communicator

if TYPE_CHECKING:
    from torch import Tensor


class Operation:
    """Calls of NCCL that are one: launched, then on a stream, then done."""

    def __init__(
        self,
        comm: Communicator,
        stream: Stream,
        calls: Sequence[Callable[[int], object]],
        tensors: Sequence[Tensor],
        ready: Event | None,
    ) -> None:
        """``tensors`` are in use until it is done. ``ready``: what it begins after."""
        self.tensors = tensors
        self._comm = comm
        self._stream = stream
        self._calls = calls
        self._ready = ready
        self._launched = False
        self._event: Event | None = None

    @property
    def event(self) -> Event | None:
        """Its end; ``None``: it is not on its stream yet."""
        return self._event

    def step(self) -> bool:
        """Do what can be done now. Whether it is over, and all bytes are where they belong.

        Raises:
            NcclError, TransportError: it never ends; its communicator is to be aborted.
            ClosedError: the communicator was aborted meanwhile.
        """
        if self._event is None:
            if not self._comm.is_settled():
                return False
            if not self._launched:
                if self._ready is not None:
                    self._stream.wait(self._ready)
                self._comm.launch(*self._calls)
                self._launched = True
                if not self._comm.is_settled():
                    return False
            for tensor in self.tensors:
                self._stream.keep(tensor)
            self._event = self._stream.record()
        # Of one that failed the event stays away until the abort, and after that nobody asks.
        if self._event.is_done():
            return True
        self._comm.is_settled()
        return False
