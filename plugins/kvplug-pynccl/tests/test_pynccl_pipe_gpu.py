"""The pipe "pynccl" over NCCL itself, between two processes. None of it has been run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from device_pipes import PipesOnAGpu
from kvplug import PeerGoneError, TimeoutError, TransportError
from kvplug.transport import Credentials, Pipe, PipeEndpoint
from kvplug_testing import peers
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.pairs import PipePairs, echo

torch = pytest.importorskip("torch")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
if GPUS == 0:
    pytest.skip("there is no GPU here", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]
PATIENCE_S = 120.0
needs_two = pytest.mark.skipif(GPUS < 2, reason="two ranks need two GPUs")


def endpoint(device: str, **options: Any) -> Any:
    from kvplug_pynccl.options import PyncclPipeOptions
    from kvplug_pynccl.pipe.endpoint import PyncclEndpoint

    return PyncclEndpoint(
        PipeEndpoint.Context(
            options=PyncclPipeOptions(**options),
            credentials=Credentials(),
            device=device,
            timeout_s=PATIENCE_S,
        )
    )


def remote_end(parent: peers.Parent, contact: str, device: str, what: str, options: dict[str, Any]) -> Any:
    with endpoint(device, **options).connect(contact) as pipe:
        return {"echo": echo}[what](parent, pipe)


@pytest.fixture
def remote_pair() -> Iterator[Callable[..., tuple[Pipe, peers.Peer]]]:
    with PipePairs() as pairs:

        def make(what: str, **options: Any) -> tuple[Pipe, peers.Peer]:
            return pairs.remote(
                endpoint("cuda:0", **options),
                lambda contact: peers.start(
                    f"{__file__}:remote_end", contact, "cuda:1", what, options, timeout_s=2 * PATIENCE_S
                ),
            )

        yield make


@needs_two
class TestPipeOnGpus(PipesOnAGpu):
    options = {"copy_bytes": 0}  # noqa: RUF012


@needs_two
def test_a_peer_that_is_killed_or_stopped_makes_no_call_hang(remote_pair: Any) -> None:
    pipe, child = remote_pair("echo")
    message = torch.rand(1 << 24, device="cuda:0")
    pipe.send_tensor(message)
    child.stop()
    with pytest.raises(TimeoutError):
        pipe.recv_tensor(timeout=0.5)
    transfer = pipe.send_tensor(message)
    child.kill()
    for call in (lambda: transfer.wait(PATIENCE_S), lambda: pipe.recv_tensor(timeout=PATIENCE_S)):
        with pytest.raises(PeerGoneError):
            call()
    again, _ = remote_pair("echo")
    again.send_tensor(message)
    assert_same(message, again.recv_tensor())


TWO_HOSTS_OF_ONE_GPU = {
    # NCCL tells hosts apart by what it is told, and goes between them over TCP on loopback only.
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


def answers_on_one_gpu(parent: peers.Parent) -> int:
    listener = endpoint("cuda:0").listen()
    parent.send(listener.contact)
    with listener.accept() as pipe:
        listener.close()
        return echo(parent, pipe)


def asks_on_one_gpu(parent: peers.Parent, contact: str) -> list[str]:
    """What did not come back as it was."""
    wrong = []
    with endpoint("cuda:0").connect(contact) as pipe:
        for dtype in dtypes():
            for shape in ((), (0,), (7,), (300, 50)):
                message = tensor_of(dtype, shape)
                pipe.send_tensor(message.to("cuda:0"))
                wrong.append(difference(message, pipe.recv_tensor().cpu()))
        large = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device="cuda:0")
        transfer, out = pipe.send_tensor(large), torch.zeros_like(large)
        if pipe.recv_tensor(out) is not out or not torch.equal(out, large):
            wrong.append("64 MiB are other bytes")
        transfer.wait(PATIENCE_S)
    return [each for each in wrong if each]


def test_two_processes_on_one_gpu_are_two_hosts_if_their_environments_say_so() -> None:
    with peers.start(
        f"{__file__}:answers_on_one_gpu",
        timeout_s=2 * PATIENCE_S,
        env=TWO_HOSTS_OF_ONE_GPU | {"NCCL_HOSTID": "kvplug-0"},
    ) as answering:
        contact = answering.recv(PATIENCE_S)
        with peers.start(
            f"{__file__}:asks_on_one_gpu",
            contact,
            timeout_s=2 * PATIENCE_S,
            env=TWO_HOSTS_OF_ONE_GPU | {"NCCL_HOSTID": "kvplug-1"},
        ) as asking:
            assert asking.result(2 * PATIENCE_S) == []
        assert answering.result(PATIENCE_S) > 0


def test_two_ranks_on_one_gpu_get_an_error_that_says_so() -> None:
    end = endpoint("cuda:0")
    listener = end.listen()
    try:
        with pytest.raises(TransportError, match="same GPU"):
            end.connect(listener.contact)
    finally:
        listener.close()
