"""One operation on the device, from its launch to its end. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvplug_pynccl.device import Event, Stream
from kvplug_pynccl.monitored import MonitoredCommunicator

if TYPE_CHECKING:
    from torch import Tensor


class Operation:
    """Calls of NCCL in one group: launched, then on a stream, then done."""

    def __init__(
        self,
        comm: MonitoredCommunicator,
        stream: Stream,
        calls: Sequence[Callable[[int], object]],
        tensors: Sequence[Tensor],
        ready: Event | None,
    ) -> None:
        """``tensors``: in use until it is done. ``ready``: the event that it begins after."""
        self.tensors = tensors
        self._comm = comm
        self._stream = stream
        self._calls = calls
        self._ready = ready
        self._launched = False
        self._event: Event | None = None

    @property
    def event(self) -> Event | None:
        """When it is done; ``None``: it is not on its stream yet."""
        return self._event

    def step(self) -> bool:
        """Do what can be done now. Whether it is done, and all bytes are where they belong.

        Raises:
            NcclError, TransportError: it will never be done; abort its communicator.
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
        # The event of an operation that failed comes with the abort only, and no step follows that.
        if self._event.is_done():
            return True
        self._comm.is_settled()
        return False
