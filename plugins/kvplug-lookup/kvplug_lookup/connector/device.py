"""What a thread has queued for a device, and how it, or another, waits for that.

A thread works on a stream of its own there: what another has only queued, it would not see. On a CPU nothing
is queued, and there is nothing to wait for. The CUDA halves were written without a device and have not been
run on one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Mark:
    """Behind everything that this thread has queued for the tensor's device by now."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event(blocking=True)  # who waits sleeps instead of spinning
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_passed(self) -> bool:
        """Whether the device has come past it."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Return when the device has come past it. Any thread, any number of times."""
        if self._event is not None:
            self._event.synchronize()
