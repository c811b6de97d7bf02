"""The communicator "pynccl" over NCCL itself, a process for each rank. None of it has been run on a GPU yet.

With fewer GPUs than ranks, ranks share one: NCCL takes them for ranks of different hosts (``NCCL_HOSTID``),
and talks over sockets on loopback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from device_pipes import keep_gpu_busy
from kvplug import KvplugError, StatelessGroup, UnsupportedError
from kvplug.transport import Credentials, DeviceCommunicator
from kvplug_pynccl.options import PyncclCommunicatorOptions
from kvplug_testing import DeviceCommunicatorContract, peers

torch = pytest.importorskip("torch")
GPUS = torch.cuda.device_count()  # by NVML: a process that has asked CUDA itself could not be forked
if GPUS == 0:
    pytest.skip("there is no GPU here", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]
PATIENCE_S = 120.0


def take_gpu(rank: int, gpus: int) -> None:
    """Before CUDA is used in this process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank % gpus)
    if rank >= gpus:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"


class TestPyncclCommunicatorOnGpus(DeviceCommunicatorContract):
    options_class = PyncclCommunicatorOptions
    ends_are_processes = True
    device = "cuda:0"
    timeout_s = PATIENCE_S

    def make_communicator(self, context: DeviceCommunicator.Context) -> DeviceCommunicator:
        if context.group.world_size > 1:
            take_gpu(context.group.rank, GPUS)

        from kvplug_pynccl.communicator.communicator import PyncclCommunicator

        return PyncclCommunicator(context)


class TestPyncclCommunicatorThatComparesOnGpus(TestPyncclCommunicatorOnGpus):
    options: ClassVar[dict[str, Any]] = {"check_order": True}


# -- what the contract does not ask ------------------------------------------------------------------


def in_group(
    parent: peers.Parent, rank: int, world_size: int, gpus: int, what: str, options: dict[str, Any]
) -> Any:
    """In a child: a rank, which does ``what``."""
    take_gpu(rank, gpus)

    from kvplug_pynccl.communicator.communicator import PyncclCommunicator

    if rank == 0:
        address: Any = StatelessGroup.listen("unix:")
        parent.send(address.contact)
    else:
        address = parent.recv()
    with StatelessGroup.create(address, rank=rank, world_size=world_size, timeout=PATIENCE_S) as group:
        context = DeviceCommunicator.Context(
            options=PyncclCommunicatorOptions(**options),
            credentials=Credentials(),
            group=group,
            device="cuda:0",
            timeout_s=PATIENCE_S,
        )
        with PyncclCommunicator(context) as made:
            found = globals()[what](parent, made)
            if what != "survives":
                group.barrier(PATIENCE_S)
    return found


def ordered(parent: peers.Parent, made: Any) -> bool:
    """On a stream of the caller's that is busy, without a wait of the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        given = torch.zeros(1 << 22, device="cuda:0")
        keep_gpu_busy()
        given.fill_(made.rank + 1)
        for _ in range(20):
            made.all_reduce(given)
            given.div_(made.world_size)
        total = given.clone()
    made.synchronize()
    stream.synchronize()
    return bool((total == (made.world_size + 1) / 2).all())


def captures(parent: peers.Parent, made: Any) -> str:
    given = torch.ones(4, device="cuda:0")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            made.all_reduce(given)
            return "it was captured"
        except UnsupportedError as e:
            return str(e)
        finally:
            given += 1
            graph.capture_end()


def survives(parent: peers.Parent, made: Any) -> Any:
    """The last rank waits to be killed, the others wait for it in a collective; then the GPU still works."""
    parent.send("ready")
    if made.rank == made.world_size - 1:
        parent.recv(timeout=None)
    given = torch.ones(1 << 20, device="cuda:0")
    try:
        made.all_reduce(given, timeout=PATIENCE_S)
        made.synchronize()
        return "it worked without the last rank"
    except KvplugError as e:
        return type(e).__name__, str(e), float(torch.ones(3, device="cuda:0").sum())


@pytest.fixture
def ranks() -> Iterator[Callable[..., list[peers.Peer]]]:
    with ExitStack() as stack:

        def start(what: str, world_size: int = 2, **options: Any) -> list[peers.Peer]:
            children = [
                stack.enter_context(
                    peers.start(
                        f"{__file__}:in_group",
                        *(rank, world_size, GPUS, what, options),
                        timeout_s=2 * PATIENCE_S,
                    )
                )
                for rank in range(world_size)
            ]
            contact = children[0].recv()
            for child in children[1:]:
                child.send(contact)
            return children

        yield start


@pytest.mark.parametrize("run_ahead", [0, 4])
def test_collectives_keep_the_order_of_the_callers_stream(ranks: Any, run_ahead: int) -> None:
    for child in ranks("ordered", run_ahead=run_ahead):
        assert child.result(timeout=PATIENCE_S) is True


def test_a_graph_that_is_being_captured_is_refused(ranks: Any) -> None:
    for child in ranks("captures"):
        assert "CUDA graph" in child.result(timeout=PATIENCE_S)


@pytest.mark.parametrize("run_ahead", [0, 4])
def test_a_rank_that_is_killed_is_named_and_the_gpu_stays_usable(ranks: Any, run_ahead: int) -> None:
    children = ranks("survives", 3, run_ahead=run_ahead)
    for child in children:
        assert child.recv() == "ready"
    children[-1].kill()
    for child in children[:-1]:
        kind, text, total = child.result(timeout=PATIENCE_S)
        assert kind == "PeerGoneError", text
        assert "rank 2" in text
        assert total == 3.0
