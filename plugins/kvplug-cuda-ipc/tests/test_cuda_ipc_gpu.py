"""The pipe "cuda-ipc" over CUDA itself, between two processes. None of it has been run on a GPU yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from device_pipes import PipesOnAGpu, keep_gpu_busy
from kvplug.net.wire import copy_into, memory_of
from kvplug.net.wire.tensors import as_bits, dense
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Credentials,
    Pipe,
    PipeEndpoint,
    PipeListener,
    Timeout,
    Transfer,
)
from kvplug_cuda_ipc.options import CudaIpcPipeOptions
from kvplug_testing import PipeContract, peers
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.pairs import PipePairs, echo, wait

torch = pytest.importorskip("torch")
# Without asking CUDA: this module is imported in the process that children are forked from.
GPU = any(Path("/dev").glob("nvidia[0-9]*"))
if not GPU:
    pytest.skip("there is no GPU here", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]
PATIENCE_S = 120.0
MIB = 1 << 20


def endpoint(device: str, **options: Any) -> Any:
    from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint

    return CudaIpcEndpoint(
        PipeEndpoint.Context(
            options=CudaIpcPipeOptions(**options),
            credentials=Credentials(),
            device=device,
            timeout_s=PATIENCE_S,
        )
    )


def remote_end(parent: peers.Parent, contact: str, device: str, what: str, options: dict[str, Any]) -> Any:
    with endpoint(device, **options).connect(contact) as pipe:
        return {"echo": echo, "wait": wait}[what](parent, pipe)


def with_expandable_segments(parent: peers.Parent, contact: str) -> None:
    """In a child whose tensors cannot be exported."""
    with endpoint("cuda:0").connect(contact) as pipe:
        echo(parent, pipe)


@pytest.fixture(params=["one GPU", "two GPUs"])
def remote_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Pipe, peers.Peer]]]:
    """This end is on the first GPU; the other one is, too, or on the second."""
    if request.param == "two GPUs" and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU here")
    other = "cuda:1" if request.param == "two GPUs" else "cuda:0"
    with PipePairs() as pairs:

        def make(what: str, **options: Any) -> tuple[Pipe, peers.Peer]:
            return pairs.remote(
                endpoint("cuda:0", **options),
                lambda contact: peers.start(
                    f"{__file__}:remote_end", contact, other, what, options, timeout_s=2 * PATIENCE_S
                ),
            )

        yield make


class TestPipeOnAGpu(PipesOnAGpu):
    pass


def test_large_messages_go_through_the_ring(remote_pair: Any) -> None:
    pipe, _ = remote_pair("echo", staging_bytes=8 * MIB, piece_bytes=MIB)
    for nbytes in (8 * MIB, 8 * MIB + 1, 100 * MIB):
        message = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda:0")
        out = torch.zeros_like(message)
        pipe.send_tensor(message)
        assert pipe.recv_tensor(out) is out
        assert_same(message, out)


def test_memory_is_received_into_only_when_the_caller_has_done_with_it(remote_pair: Any) -> None:
    pipe, _ = remote_pair("echo")
    pipe.send_tensor(torch.ones(1 << 22, device="cuda:0"))
    out, kept = torch.zeros(1 << 22, device="cuda:0"), torch.ones(1 << 22, device="cuda:0")
    keep_gpu_busy()
    kept.copy_(out)
    assert pipe.recv_tensor(out) is out
    assert_filled(1, out)
    assert_filled(0, kept)


def test_a_busy_device_delays_neither_messages_nor_the_end(remote_pair: Any) -> None:
    pipe, _ = remote_pair("echo")
    message = torch.rand(1 << 20, device="cuda:0")
    pipe.send_tensor(message)
    pipe.recv_tensor()
    busy = torch.cuda.Stream("cuda:0")
    done = torch.cuda.Event()
    with torch.cuda.stream(busy):
        keep_gpu_busy(20_000_000_000)  # some ten seconds
        done.record()
    pipe.send_tensor(message)
    assert_same(message.cpu(), pipe.recv_tensor().cpu())
    began = time.monotonic()
    pipe.close()
    assert not done.query(), "close has waited for the device"
    assert time.monotonic() - began < 5.0


def test_tensors_that_cannot_be_exported_are_sent_all_the_same() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with (
        endpoint("cuda:0").listen() as listener,
        peers.start(f"{__file__}:with_expandable_segments", listener.contact, env=env),
        listener.accept() as pipe,
    ):
        message = torch.rand(1 << 20, device="cuda:0")
        pipe.send_tensor(message)
        assert_same(message, pipe.recv_tensor())


def test_pipes_that_come_and_go_leave_no_memory(remote_pair: Any) -> None:
    def free() -> int:
        return int(torch.cuda.mem_get_info(0)[0])

    def once() -> None:
        pipe, child = remote_pair("echo")
        pipe.send_tensor(torch.ones(100, device="cuda:0"))
        pipe.recv_tensor()
        pipe.close()
        child.result(PATIENCE_S)

    once()
    before = free()
    for _ in range(5):
        once()
    limit = time.monotonic() + PATIENCE_S
    while free() < before - 8 * MIB:
        assert time.monotonic() < limit, f"{before - free()} bytes are gone"
        time.sleep(0.1)


# -- the kit, whose tensors are the CPU's -------------------------------------------------------------------


def is_dense_of_the_cpu(tensor: Any) -> bool:
    """What the kit sends; what it has refused goes on as it is."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
    )


class Moved(Pipe):
    """A pipe of CPU tensors, which are moved to the GPU and back."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    @property
    def peer(self) -> str:
        return self._pipe.peer

    def _send_tensor(self, tensor: Any, timeout: Timeout) -> Transfer:
        if is_dense_of_the_cpu(tensor):
            tensor = as_bits(dense(tensor.detach())).to("cuda").view(tensor.dtype).view(tensor.shape)
        return self._pipe.send_tensor(tensor, timeout=timeout)

    def _receive_tensor(self, out: Any, timeout: Timeout) -> Any:
        if out is None:
            came = self._pipe.recv_tensor(timeout=timeout)
            return None if came is None else as_bits(came).cpu().view(came.dtype)
        if not is_dense_of_the_cpu(out):
            return self._pipe.recv_tensor(out, timeout=timeout)
        there = torch.empty(out.numel() * out.element_size(), dtype=torch.uint8, device="cuda")
        self._pipe.recv_tensor(there.view(out.dtype).view(out.shape), timeout=timeout)
        copy_into(out, memory_of(there.cpu()))
        return out

    def _close(self, timeout: Timeout) -> None:
        self._pipe.close(timeout)

    def _abort(self) -> None:
        self._pipe.abort()


class MovedListener(PipeListener):
    def __init__(self, listener: PipeListener) -> None:
        self._listener = listener

    @property
    def contact(self) -> str:
        return self._listener.contact

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        return Moved(self._listener.accept(timeout))

    def close(self) -> None:
        self._listener.close()


class MovedEndpoint(PipeEndpoint):
    def __init__(self, end: PipeEndpoint) -> None:
        self._end = end

    def listen(self) -> PipeListener:
        return MovedListener(self._end.listen())

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        return Moved(self._end.connect(contact, timeout))


class TestCudaIpcPipeOnAGpu(PipeContract):
    options_class = CudaIpcPipeOptions
    options: ClassVar[dict[str, Any]] = {"staging_bytes": 4 * MIB, "piece_bytes": 256 << 10}
    forked_processes = "CUDA cannot be used in a forked child"

    def import_all(self) -> None:
        import kvplug_cuda_ipc.pipe.endpoint  # noqa: F401

        super().import_all()

    def make_endpoint(self, context: PipeEndpoint.Context) -> PipeEndpoint:
        from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint

        return MovedEndpoint(CudaIpcEndpoint(attrs.evolve(context, device="cuda")))
