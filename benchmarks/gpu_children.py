"""What runs in the processes that ``gpu.py`` starts: ends of pipes, ranks, and what one process does alone.

``library`` is a fake of ours over the CPU's memory where ``--fake`` was given, else empty. Sizes are in
bytes, results are the seconds of each burst.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import harness

import kvplug
import kvplug.engine
import kvplug.transport
from kvplug_bench.content import check, content, stamp
from kvplug_bench.device import TimedDevice, open_device
from kvplug_bench.links import RENDEZVOUS_TIMEOUT_S, Rendezvous
from kvplug_bench.stopwatch import BURSTS, Stopwatch, in_burst
from kvplug_bench.transports import PipeLink
from kvplug_testing import peers

if TYPE_CHECKING:
    import torch

Seconds = dict[str, list[float]]

TWO_HOSTS = {
    # NCCL refuses two ranks on one GPU of one host. It tells hosts apart by NCCL_HOSTID, and goes between
    # them over what networks have: here TCP on loopback.
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "KVPLUG_TEST_NCCL_GPU": "one",  # the fake's
}
BLOCK_TOKENS, HEADS, HEAD_SIZE = 16, 8, 128
SPARE = 2
"""A cache has so many times the blocks that are moved."""


def be_a_host(rank: int) -> None:
    """Before NCCL is loaded: it looks once."""
    os.environ["NCCL_HOSTID"] = f"kvplug-{rank}"


class OneGpu(PipeLink):
    """The pipe "pynccl" between two processes of one GPU, which NCCL takes for two hosts'."""

    def __init__(self, rendezvous: Rendezvous, path: str | None, overrides: Sequence[str]) -> None:
        be_a_host(rendezvous.rank)
        super().__init__(rendezvous, path, overrides)


class OverFake(PipeLink):
    """A pipe over the fake library of its plugin."""

    def __init__(self, rendezvous: Rendezvous, transport: str, library: str) -> None:
        be_a_host(rendezvous.rank)
        endpoint = _ENDPOINTS[transport](library)
        if rendezvous.is_first:
            with contextlib.closing(endpoint.listen()) as listener:
                rendezvous.send(listener.contact)
                self.pipe = listener.accept(RENDEZVOUS_TIMEOUT_S)
        else:
            self.pipe = endpoint.connect(rendezvous.recv(), RENDEZVOUS_TIMEOUT_S)


def _cuda_ipc(library: str) -> kvplug.transport.PipeEndpoint:
    from kvplug_cuda_ipc.options import CudaIpcPipeOptions
    from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint
    from kvplug_lab.gpu.cuda_ipc import HostDevice

    options = CudaIpcPipeOptions(library=library, staging_bytes=4 << 20, piece_bytes=1 << 20)
    return CudaIpcEndpoint(_context(options), HostDevice(library))


def _pynccl(library: str) -> kvplug.transport.PipeEndpoint:
    from kvplug_lab.gpu.pynccl import HostDevice
    from kvplug_pynccl.options import PyncclPipeOptions
    from kvplug_pynccl.pipe.endpoint import PyncclEndpoint

    return PyncclEndpoint(_context(PyncclPipeOptions(library=library)), HostDevice(library))


def _context(options: object) -> kvplug.transport.PipeEndpoint.Context:
    return kvplug.transport.PipeEndpoint.Context(options=options, credentials=kvplug.transport.Credentials())


_ENDPOINTS = {"cuda-ipc": _cuda_ipc, "pynccl": _pynccl}


# -- one process alone -------------------------------------------------------------------------------


def card(parent: peers.Parent) -> dict[str, Any]:
    """What is here. ``gpus`` is 0 where torch cannot use any, and ``why`` says why."""
    import ctypes

    import torch

    found: dict[str, Any] = {"torch": str(torch.__version__), "gpus": 0}
    with contextlib.suppress(kvplug.KvplugError, ImportError):
        from kvplug_pynccl.nccl.library import load

        found["NCCL"] = str(load().version)
    try:
        torch.empty(1, device="cuda")
    except (RuntimeError, AssertionError) as e:
        return found | {"why": str(e).partition("\n")[0]}
    count = torch.cuda.device_count()
    cards = [torch.cuda.get_device_properties(index) for index in range(count)]
    found |= {
        "gpus": count,
        "card": ", ".join(f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in cards),
        "CUDA of torch": torch.version.cuda,
    }
    with contextlib.suppress(OSError, AttributeError):
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        found["CUDA of the driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return found


def paged(parent: peers.Parent, device: str, layers: int, tokens: int, times: int) -> Seconds:
    """Blocks of a paged cache gathered and scattered, layer by layer, beside a copy of as many bytes.

    By the order of tokens and heads in a block. Block ids are shuffled.
    """
    import torch

    torch.set_num_threads(1)
    where = open_device(device)
    found: Seconds = {}
    for axes, order in (("KBTHD", "tokens, heads"), ("KBHTD", "heads, tokens")):
        blocks = SPARE * (tokens // BLOCK_TOKENS)
        layout = kvplug.engine.KVLayout(
            axes, {"K": 2, "B": blocks, "T": BLOCK_TOKENS, "H": HEADS, "D": HEAD_SIZE}
        )
        nbytes = paged_bytes(1, tokens)
        shape = [layout.sizes[axis] for axis in axes]
        caches = [content(SPARE * nbytes, where.name).roll(2 * n).view(shape) for n in range(layers)]
        flat = [content(nbytes, where.name).view(2, tokens, HEADS, HEAD_SIZE) for _ in caches]
        copies = [torch.zeros_like(each) for each in flat]
        ids = random.Random(axes).sample(range(blocks), blocks // SPARE)
        calls = _paged_calls(caches, flat, copies, layout, ids)
        calls["gather"]()
        for cache in caches:
            cache.zero_()
        calls["scatter"]()
        for cache, given, copy in zip(caches, flat, copies):
            layout.gather(cache, ids, 0, tokens, out_key=copy[0], out_value=copy[1])
            check(copy.view(-1), given.view(-1))
        found |= {f"{what}, {order}": took for what, took in timed(calls, where.synchronize, times).items()}
    return found


def paged_bytes(layers: int, tokens: int) -> int:
    """Of keys and values in float16."""
    return layers * 2 * tokens * HEADS * HEAD_SIZE * 2


def _paged_calls(
    caches: Sequence[torch.Tensor],
    flat: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor],
    layout: kvplug.engine.KVLayout,
    ids: Sequence[int],
) -> dict[str, Callable[[], None]]:
    tokens = flat[0].shape[1]

    def gather() -> None:
        for cache, out in zip(caches, flat):
            layout.gather(cache, ids, 0, tokens, out_key=out[0], out_value=out[1])

    def scatter() -> None:
        for cache, given in zip(caches, flat):
            layout.scatter(cache, ids, 0, given[0], given[1])

    def copy() -> None:
        for out, given in zip(copies, flat):
            out.copy_(given)

    return {"gather": gather, "scatter": scatter, "copy": copy}


def staged(parent: peers.Parent, device: str, layers: int, tokens: int, times: int) -> Seconds:
    """Pages of the store "host" into a paged cache on a device and out of it, beside copies of as many bytes
    between pinned memory and the device."""
    import torch

    if device == "simulated":
        from kvplug_testing import simulated

        simulated.enable()
    torch.set_num_threads(1)
    finish = torch.get_device_module(torch.device(device)).synchronize
    layout = kvplug.engine.KVLayout("BHTKD", {"T": BLOCK_TOKENS, "H": HEADS, "D": HEAD_SIZE})
    form = layout.page_format("float16", layers, BLOCK_TOKENS)
    count = tokens // BLOCK_TOKENS
    shape = (SPARE * count, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
    whole = [torch.rand(shape).half().to(device) for _ in range(layers)]
    empty = [torch.zeros(shape, dtype=torch.float16).to(device) for _ in range(layers)]
    ids = random.Random(1).sample(range(SPARE * count), count)
    nbytes = count * form.nbytes
    with contextlib.ExitStack() as stack:
        store = harness.opened(stack, {"size": 4 * nbytes + (256 << 20)})
        series, number = harness.series(store, form), itertools.count()

        def request(caches: Sequence[torch.Tensor], name: bytes) -> kvplug.transport.PageRequest:
            memory = kvplug.engine.PageBlocks(form, layout.page_views(caches), ids, 0, count)
            return harness.request(series, memory, name, count)

        harness.put(store, request(whole, b"kept"))
        wanted = request(empty, b"kept")
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "simulated")
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        calls = {
            "get": lambda: harness.get(store, wanted),
            "copy in": lambda: there.copy_(host, non_blocking=True),
            "put": lambda: harness.put(store, request(whole, b"new %d" % next(number)))(),
            "copy out": lambda: host.copy_(there, non_blocking=True),
        }
        found = timed(calls, finish, times)
    for one, other in zip(whole, empty):
        check(other[ids].cpu().view(-1), one[ids].cpu().view(-1))
    return found


def to_itself(
    parent: peers.Parent, device: str, sizes: Sequence[int], burst_bytes: int, library: str
) -> Seconds:
    """NCCL with one rank, which sends to itself, by the binding; beside a copy."""
    import torch

    from kvplug_pynccl.nccl.abi import DataType
    from kvplug_pynccl.nccl.library import load

    where = open_device(device)
    nccl = load(library)
    comm = nccl.comm_init_rank(1, nccl.get_unique_id(), 0)
    found: Seconds = {}
    with _stream(where, library) as (stream, finish):
        for nbytes in sizes:
            given = content(nbytes, where.name)
            out, copied = torch.zeros_like(given), torch.zeros_like(given)

            def send(given: torch.Tensor = given, out: torch.Tensor = out) -> None:
                nccl.group_start()
                nccl.send(given.data_ptr(), given.nbytes, DataType.UINT8, 0, comm, stream)
                nccl.recv(out.data_ptr(), out.nbytes, DataType.UINT8, 0, comm, stream)
                nccl.group_end()

            def copy(given: torch.Tensor = given, copied: torch.Tensor = copied) -> None:
                copied.copy_(given)

            stamp(given, nbytes)
            where.synchronize()
            took = timed({"send": send, "copy": copy}, finish, in_burst(nbytes, burst_bytes))
            check(out, given)
            found |= {f"{what} {nbytes}": seconds for what, seconds in took.items()}
    nccl.comm_destroy(comm)
    return found


@contextlib.contextmanager
def _stream(where: TimedDevice, library: str) -> Iterator[tuple[int, Callable[[], object]]]:
    """The stream that NCCL is given, and how to wait until it is done."""
    if not library:
        import torch

        yield torch.cuda.current_stream().cuda_stream, where.synchronize
        return
    from kvplug_lab.gpu import fake

    stream = fake.Controls(library).stream()
    yield stream.handle, stream.synchronize
    stream.close()


# -- ranks -------------------------------------------------------------------------------------------


def all_reduce(
    parent: peers.Parent,
    rank: int,
    device: str,
    sizes: Sequence[int],
    times: int,
    library: str,
    shares_gpu: bool,
) -> Seconds:
    """One of two ranks of the communicator "pynccl"; beside a copy."""
    import torch

    if shares_gpu:
        be_a_host(rank)
    where = open_device(device)
    listener = None if rank else kvplug.StatelessGroup.listen("unix:")
    if listener is not None:
        parent.send(listener.contact)
    found: Seconds = {}
    address: Any = listener or parent.recv(RENDEZVOUS_TIMEOUT_S)
    with (
        kvplug.StatelessGroup.create(address, rank=rank, world_size=2, timeout=RENDEZVOUS_TIMEOUT_S) as group,
        _communicator(group, where, library) as made,
    ):
        for nbytes in sizes:
            whole = made.all_reduce(torch.full((nbytes // 4,), rank + 1.0, device=where.name))
            if not bool((whole == 3.0).all()):
                raise AssertionError(f"the sum of {nbytes} bytes is wrong")
            given, copied = (torch.zeros(nbytes // 4, device=where.name) for _ in range(2))

            def reduce(given: torch.Tensor = given) -> None:
                made.all_reduce(given, timeout=RENDEZVOUS_TIMEOUT_S)

            def copy(given: torch.Tensor = given, copied: torch.Tensor = copied) -> None:
                copied.copy_(given)

            took = timed({"all_reduce": reduce, "copy": copy}, where.synchronize, times)
            found |= {f"{what} {nbytes}": seconds for what, seconds in took.items()}
        group.barrier(RENDEZVOUS_TIMEOUT_S)
    return found


def _communicator(
    group: kvplug.StatelessGroup, where: TimedDevice, library: str
) -> kvplug.transport.DeviceCommunicator:
    from kvplug_pynccl.communicator.communicator import PyncclCommunicator
    from kvplug_pynccl.options import PyncclCommunicatorOptions

    context = kvplug.transport.DeviceCommunicator.Context(
        options=PyncclCommunicatorOptions(library=library),
        credentials=kvplug.transport.Credentials(),
        group=group,
        device=where.name,
        timeout_s=RENDEZVOUS_TIMEOUT_S,
    )
    if not library:
        return PyncclCommunicator(context)
    from kvplug_lab.gpu.pynccl import HostCommunicator, HostDevice

    return HostCommunicator(context, HostDevice(library))


def copied(parent: peers.Parent, device: str, nbytes: int, times: int) -> float:
    """GB/s of a copy on the device: the median of so many."""
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    wait = torch.cuda.synchronize if source.is_cuda else bool

    def copy() -> None:
        target.copy_(source)
        wait()

    taken = [harness.seconds(copy)[0] for _ in range(times)]
    return nbytes / statistics.median(taken) / 1e9


def timed(calls: Mapping[str, Callable[[], None]], finish: Callable[[], object], times: int) -> Seconds:
    """Bursts of so many calls each, in turns, until the device has done them."""
    watches = {name: Stopwatch() for name in calls}
    for number in range(BURSTS):
        for name in harness.in_order(calls, number):
            finish()
            watches[name].start()
            for _ in range(times):
                calls[name]()
            finish()
            watches[name].stop()
    return {name: watch.plain()["seconds"] for name, watch in watches.items()}
