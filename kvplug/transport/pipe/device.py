"""The device of a pipe's tensors: marks on the caller's stream, streams for the pipe, and new tensors."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from kvplug.errors import ConfigError, TransportError, UnsupportedError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.streams import DeviceMark, StreamPool, on_stream
from kvplug.net.wire.tensors import TensorMeta, copy_tensor, empty_like_meta

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvplug.transport.pipe.blocks import Blocks


class Mark(Protocol):
    """A point in the work that was queued on a device."""

    def is_done(self) -> bool:
        """Whether the device has done all work before the mark. Never waits.

        Raises:
            TransportError: the device failed.
        """


class _TorchMark(DeviceMark):
    __slots__ = ()

    def is_done(self) -> bool:
        try:
            return self.is_passed
        except RuntimeError as e:
            NamedExhaustion.check(e, "the device failed")
            raise TransportError(f"the device failed: {e}") from e


class PipeStream(Protocol):
    """A stream that only one pipe uses."""

    @property
    def handle(self) -> int:
        """A ``cudaStream_t``."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which torch queues work on this stream, and allocates memory for it."""

    def close(self) -> None:
        """Release the stream. Queued work still runs. Idempotent."""


class _TorchStream:
    """A torch stream. For the CPU it wraps no stream, and its methods do nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else StreamPool.acquire(device)

    def current(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else on_stream(self._stream)

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream) if self._stream is not None else 0

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            StreamPool.release(stream)


class TensorDevice:
    """The device of the tensors that a pipe moves, used through torch. Plugins subclass it."""

    def __init__(self, name: str) -> None:
        """``name`` is the context's ``device``.

        Raises:
            ConfigError: torch does not know the device.
        """
        import torch

        device = _device_named(name)
        self.torch = device if device.type == "cpu" or device.index is not None else torch.device(name, 0)
        """The ``torch.device``, with an index unless it is the CPU."""
        self.name = str(self.torch)

    @staticmethod
    def gpu(name: str, transport: str) -> torch.device:
        """Return the GPU of that name.

        Raises:
            ConfigError: the name is not that of a GPU, or this host does not have the GPU.
        """
        import torch

        device = _device_named(name)
        if device.type != "cuda":
            raise ConfigError(f"{transport!r} moves CUDA tensors, but the device is {name!r}")
        if not torch.cuda.is_available():
            raise ConfigError(f"{transport!r} needs a GPU, and torch {torch.__version__} finds none here")
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            count = torch.cuda.device_count()
        except RuntimeError as e:  # in a forked child of a process that has used the GPU
            raise ConfigError(f"the GPU cannot be used in this process: {e}") from e
        if index >= count:
            raise ConfigError(f"device: {name!r} does not exist; there are {count} GPUs")
        return torch.device("cuda", index)

    # -- tensors -----------------------------------------------------------------------------------------

    def carries(self, given: Tensor | Blocks) -> bool:
        """Whether pipes of this device send such tensors and receive into them."""
        return str(given.device) == self.name

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory can be moved without :meth:`staged` and :meth:`copy`."""
        return True

    def check(self, given: Tensor | Blocks, verb: str) -> None:
        """Check that pipes of this device carry the tensor. ``verb``: "sends" or "receives into".

        Raises:
            UnsupportedError: they do not.
        """
        if not self.carries(given):
            raise UnsupportedError(
                f"this pipe {verb} tensors on {self.name}, and this one is on {given.device}: move it, or use"
                " a pipe for its device"
            )

    def staged(self, tensor: Tensor) -> Tensor:
        """Return a tensor for which :meth:`holds` is true: this one, or a copy that is made on the caller's
        current stream."""
        return tensor

    def copy(self, out: Tensor, message: Tensor) -> None:
        """Queue a copy of the whole message into ``out`` (of any strides) on the caller's current stream."""
        copy_tensor(out, message)

    # -- order -------------------------------------------------------------------------------------------

    def now(self, on: torch.device | None = None) -> Mark | None:
        """Return a mark after all work that was queued on the caller's current stream, or ``None`` if there
        is no unfinished work.

        ``on``: the device of the tensor, for pipes that carry tensors of several devices.
        """
        on = on or self.torch
        return None if on.type == "cpu" else _TorchMark(on)

    def queue_after(self, mark: Mark) -> None:
        """Make later work on the caller's current stream begin after ``mark``. The host does not wait."""
        import torch

        assert isinstance(mark, _TorchMark)
        mark.hold(torch.get_device_module(self.torch).current_stream(self.torch))

    def hand_over(self, tensor: Tensor) -> None:
        """Let work on the caller's current stream use a tensor that was made for another stream: once the
        tensor is freed, its memory is not reused before that work is done."""
        if tensor.device.type != "cpu":
            import torch

            stream = torch.get_device_module(self.torch).current_stream(self.torch)
            if isinstance(stream, torch.Stream):  # else a simulated one, whose memory no stream owns
                tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Whether work that this thread queues becomes part of a CUDA graph instead of running now."""
        if not self.name.startswith("cuda"):
            return False
        import torch

        with torch.cuda.device(self.torch):
            return bool(torch.cuda.is_current_stream_capturing())

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which this is the thread's current device."""
        return contextlib.nullcontext()

    def adopt(self) -> None:
        """Make this the current device of the calling thread, which belongs to a pipe, until the thread
        ends."""

    # -- of a pipe ---------------------------------------------------------------------------------------

    def new_stream(self) -> PipeStream:
        """Return a stream for one pipe.

        Raises:
            TransportError: the device cannot make a stream.
        """
        try:
            return _TorchStream(self.torch)
        except RuntimeError as e:
            NamedExhaustion.check(e, f"a stream of {self.name}")
            raise TransportError(f"{self.name} cannot make a stream: {e}") from e

    def empty(self, meta: TensorMeta, stream: PipeStream) -> Tensor:
        """Return a new tensor that work on ``stream`` may write at once.

        Raises:
            ResourceExhaustedError: there is not enough memory; the message stays.
            UnsupportedError: the installed torch lacks the dtype.
        """
        with stream.current():
            return empty_like_meta(meta, self.name)


def _device_named(name: str) -> torch.device:
    """Return the torch device. Raises ConfigError if torch does not know it."""
    import torch

    try:
        return torch.device(name)
    except RuntimeError as e:
        raise ConfigError(f"device: torch does not know {name!r}: {e}") from e
