"""One operation of NCCL, from its launch to its end on the device. No method waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvplug.transport import OfferPipe
from kvplug_pynccl.device import Device
from kvplug_pynccl.monitored import MonitoredCommunicator

if TYPE_CHECKING:
    from torch import Tensor


class Operation:
    """Calls of NCCL in one group: launched, then on a stream, then done."""

    def __init__(
        self,
        comm: MonitoredCommunicator,
        device: Device,
        stream: OfferPipe.Stream,
        calls: Sequence[Callable[[int], object]],
        tensors: Sequence[Tensor],
        ready: OfferPipe.Mark | None = None,
    ) -> None:
        """
        Args:
            stream: The stream that the ``calls`` use.
            tensors: They are in use until the operation is done.
            ready: The operation begins after it. ``None``: at once.
        """
        self.tensors = tensors
        self.done: OfferPipe.Mark | None = None
        """Passed when the operation is done; ``None`` until the operation is on its stream."""
        self._comm = comm
        self._device = device
        self._stream = stream
        self._calls = calls
        self._ready = ready
        self._launched = False

    def step(self) -> bool:
        """Do what can be done now. Return whether the operation is done: all bytes are where they belong.

        Raises:
            NcclError, TransportError: it will never be done; abort its communicator.
            ClosedError: the communicator was aborted meanwhile.
        """
        if self.done is None:
            if not self._comm.is_settled():
                return False
            with self._stream.current():
                if not self._launched:
                    if self._ready is not None:
                        self._device.queue_after(self._ready)
                    self._comm.launch(*self._calls)
                    self._launched = True
                    if not self._comm.is_settled():
                        return False
                for tensor in self.tensors:
                    self._device.hand_over(tensor)
                self.done = self._device.now()
            assert self.done is not None
        # The mark of an operation that failed is passed only after the abort, and no step follows that.
        if self.done.is_done():
            return True
        self._comm.is_settled()
        return False
