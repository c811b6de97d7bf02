"""The pipe "memory" with one fault each, and the law that the fault breaks."""

from __future__ import annotations

from typing import Any

from kvplug.testing import PipeContract
from kvplug.testing.memory.pipe import MemoryEndpoint, MemoryPipe


class Mutant(PipeContract):
    """One fault. ``pipe`` has it; ``breaks`` are the laws that it breaks, each seen by a test of that law."""

    transport = "memory"
    across_processes = False
    pipe: type[MemoryPipe] = MemoryPipe
    breaks: tuple[str, ...] = ()

    def make_endpoint(self, context: Any) -> Any:
        pipe = self.pipe

        class Endpoint(MemoryEndpoint):
            def make_pipe(self) -> MemoryPipe:
                return pipe(self._context)

        return Endpoint(context)


class TestFlipsOneBit(Mutant):
    """The lowest bit of the last byte of a message is lost."""

    breaks = ("PIPE-1",)

    class pipe(MemoryPipe):  # noqa: N801
        def recv_tensor(self, *args: Any, **given: Any) -> Any:
            import torch

            message = super().recv_tensor(*args, **given)
            if message is not None and message.numel():
                message.view(-1).view(torch.uint8)[-1] &= 0xFE
            return message
