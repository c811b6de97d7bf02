"""Tensors on a device: their bits (laws PIPE-1 and 5), and the order with the caller's stream (law PIPE-8).

The order is judged with kernels that begin late: on the simulated device of the kit, or on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import pytest

from kvplug import TimeoutError
from kvplug_testing import simulated, waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, passes
from kvplug_testing.waits import Call

_SHORT_S: Final = 0.1
"""The timeout of a call while the device does nothing."""
_SPIN_CYCLES: Final = 4_000_000_000
"""Of a GPU's clock: about two seconds."""
_ROWS: Final = {
    "out": [2, 3, 4, 5, 6],
    "strided out": [0, 2, 4, 6, 8],
    "blocks": [2, 3, 4, 5, 6],
    "scattered blocks": [6, 0, 2, 8, 4],
}
"""The rows, of a cache of nine, that a message of five is sent from or received into."""
_CASES: Final = [("out", 100), *((each, MIB // 4) for each in _ROWS)]
"""Each with the bytes of a row."""


class LateKernels:
    """A caller's stream on a device, whose kernels begin late."""

    queues_torch = True
    """Whether operations of torch are queued, too. If not, only copies without them are judged."""

    def __init__(self, device: str) -> None:
        import torch

        self.device: Final = device
        """As torch names it."""
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def calling(self) -> AbstractContextManager[Any]:
        """A context in which the calling thread queues its work on the stream."""
        stream: AbstractContextManager[Any] = self._module.stream(self._stream)
        return stream

    @contextmanager
    def late(self) -> Iterator[None]:
        """While the block runs, the device does nothing of what is queued in it."""
        with self.calling():
            if self.device == "simulated":
                with simulated.stalled():
                    yield
            else:
                self._module._sleep(_SPIN_CYCLES)
                yield

    def tensor(self, content: Any) -> Any:
        """A tensor on the device with the elements of one on the CPU."""
        with self.calling():
            made = content.to(self.device)
        self._stream.synchronize()
        return made

    def copy(self, target: Any, source: Any) -> None:
        """Queue a kernel that copies a tensor."""
        with self.calling():
            target.copy_(source)

    def read(self, tensor: Any) -> Any:
        """The elements that the next kernel would read, on the CPU."""
        with self.calling():
            return tensor.cpu()

    def call(self, function: Callable[[], Any]) -> Call:
        """A call in another thread, whose current stream is this one."""

        def on_the_stream() -> Any:
            with self.calling():
                return function()

        return Call(on_the_stream)


class Devices(PipeSuite):
    """Tensors of the devices that a transport claims besides the CPU."""

    def late_kernels(self) -> LateKernels:
        """A caller's stream on the first claimed device that is here and not the CPU. Skips the test without
        one. Override it for a device that torch does not know.
        """
        for device in self.devices[1:]:
            if not _missing(device):
                return LateKernels(device)
        pytest.skip(f"{self.called} claims no device but the CPU that is here")

    def _kernels_for(self, which: str, nbytes: int) -> LateKernels:
        kernels = self.late_kernels()
        if not kernels.queues_torch and (which not in ("out", "blocks") or nbytes < MIB // 4):
            pytest.skip("copies by torch are not queued on the device of this test")
        return kernels

    @law("PIPE-1", "PIPE-5")
    def test_a_tensor_of_each_claimed_device_arrives_with_its_bits(self) -> None:
        import torch

        for device in self.devices:
            if reason := _missing(device):
                pytest.skip(reason)
            one, other = self.pair(device=device)
            message = tensor_of("float32", (40, 30)).to(device)
            for out in (None, torch.zeros_like(message)):
                passes(one, other, message, out)

    @law("PIPE-8")
    @pytest.mark.parametrize(("source", "nbytes"), _CASES)
    def test_what_a_late_kernel_writes_is_sent(self, source: str, nbytes: int) -> None:
        kernels = self._kernels_for(source, nbytes)
        one, other = self.pair(device=kernels.device)
        wanted = tensor_of("uint8", (9, nbytes))
        computed, cache = kernels.tensor(wanted), kernels.tensor(wanted.bitwise_not())
        send = _sends(one, cache, source)
        with kernels.late():
            kernels.copy(cache, computed)
            sending = _begun(kernels, send)
        got = kernels.call(partial(other.recv_tensor, timeout=waits.patience_s)).result()
        sending.result().wait(waits.patience_s)
        found = kernels.read(got).view(5, nbytes)
        assert_same(wanted[_ROWS[source]], found, "it was sent before the kernel had written it")

    @law("PIPE-8")
    @pytest.mark.parametrize(("target", "nbytes"), _CASES)
    def test_memory_is_received_into_after_a_late_kernel_has_read_it(self, target: str, nbytes: int) -> None:
        kernels = self._kernels_for(target, nbytes)
        one, other = self.pair(device=kernels.device)
        before, message = tensor_of("uint8", (9, nbytes)), tensor_of("uint8", (5, nbytes), seed=2)
        cache, kept = kernels.tensor(before), kernels.tensor(before.bitwise_not())
        sent = message.unsqueeze(0) if "blocks" in target else message
        transfer = kernels.call(partial(one.send_tensor, kernels.tensor(sent))).result()
        with kernels.late():
            kernels.copy(kept, cache)
            receiving = _begun(kernels, _receives(other, cache, target))
        receiving.result()
        transfer.wait(waits.patience_s)
        assert_same(before, kernels.read(kept), "it was written while a kernel had still to read it")
        before[_ROWS[target]] = message
        assert_same(before, kernels.read(cache), "the next kernel does not read the message")


def _missing(device: str) -> str:
    """Why there are no tensors of a device here; empty if there are."""
    import torch

    if device == "simulated":
        simulated.enable()
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as e:  # torch raises either
        return f"torch has no device {device} here: {str(e).partition('.')[0]}"
    return ""


def _begun(kernels: LateKernels, function: Callable[..., Any]) -> Call:
    """A call that has begun. If one with a short timeout fails for that, it is another one."""
    first = kernels.call(partial(function, timeout=_SHORT_S))
    if isinstance(first.outcome(), TimeoutError):
        return kernels.call(partial(function, timeout=waits.patience_s))
    return first


def _sends(pipe: Any, cache: Any, source: str) -> Callable[..., Any]:
    if "blocks" in source:
        return partial(pipe.send_blocks, [cache], _ROWS[source])
    return partial(pipe.send_tensor, _out(cache, source))


def _receives(pipe: Any, cache: Any, target: str) -> Callable[..., Any]:
    if "blocks" in target:
        return partial(pipe.recv_blocks, [cache], _ROWS[target])
    return partial(pipe.recv_tensor, _out(cache, target))


def _out(cache: Any, which: str) -> Any:
    first, second = _ROWS[which][:2]
    return cache[first : _ROWS[which][-1] + 1 : second - first]
