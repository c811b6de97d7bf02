"""Pipes whose tensors fail, arrive changed or are delayed while a switch is on."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvplug import ClosedError, TimeoutError, TransportError
from kvplug.transport import Deadline, Pipe, Timeout
from kvplug_testing.pairs import PipeAround

if TYPE_CHECKING:
    from torch import Tensor

_SIGNAL_BYTES = 2048
"""Smaller tensors are control messages between the two ends; ``"corrupt"`` does not change them."""

_HELD_S = 10.0
"""How long a held receive waits if no timeout is given."""


class FaultSwitch:
    """What happens to received tensors."""

    def __init__(self) -> None:
        self.how = ""
        """``"fail"``, ``"corrupt"``, ``"hold"``, or empty."""
        self.is_held = threading.Event()
        """Set while a receive is held."""
        self.num_pipes = 0


class FaultInjectingPipe(PipeAround):
    """A pipe around another one that follows the switch."""

    def __init__(self, pipe: Pipe, switch: FaultSwitch) -> None:
        super().__init__(pipe)
        self._switch = switch
        self._late: Tensor | None = None
        """The tensor of a held receive that has run out of time: the next one gets it, as from any pipe."""
        switch.num_pipes += 1

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        late, self._late = self._late, None
        if late is None:
            found = super()._receive_tensor(out, timeout)
        else:
            found = late if out is None else out.copy_(late)
        if found is None or found.numel() * found.element_size() < _SIGNAL_BYTES:
            return found
        deadline = Deadline.after(timeout, _HELD_S)
        while self._switch.how == "hold":  # as a receive waits whose tensor has arrived only in part
            self._switch.is_held.set()
            if self.closed:
                raise ClosedError("the test's pipe was closed")
            if deadline.expired:
                self._late = found
                raise TimeoutError("the rest of a tensor did not come in time: the test holds it up")
            time.sleep(0.002)
        if self._switch.how == "fail":
            raise TransportError("the test's pipe is broken")
        if self._switch.how == "corrupt":
            import torch

            found.view(-1).view(torch.uint8)[found.numel() // 2] ^= 1
        return found
