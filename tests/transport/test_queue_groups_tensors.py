"""A queue that is made over torch's process groups, by real processes and a queue between processes."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402

from kvplug import CapacityError  # noqa: E402
from kvplug.transport import Credentials, QueueEndpoint, WireError  # noqa: E402
from kvplug.transport.group.group import _TorchRanks  # noqa: E402
from kvplug_testing import peers  # noqa: E402
from kvplug_testing.sources import module_at  # noqa: E402

pytestmark = pytest.mark.timeout(240)

LIFE_S = 200.0
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
SUBJECT = str(Path(__file__).parents[2] / "tests/lab/subjects/relay.py")


@contextlib.contextmanager
def joined(store: str, rank: int, world_size: int) -> Iterator[None]:
    """In the default group of torch, over files and the loopback interface."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=LIFE_S / 2),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def endpoint(kind: Any = None) -> Any:
    made_by = kind or module_at(SUBJECT).RelayEndpoint
    return made_by(QueueEndpoint.Context(options=None, credentials=Credentials(), timeout_s=LIFE_S / 2))


def broadcasts(parent: peers.Parent, store: str, rank: int, world_size: int) -> Any:
    """A rank of the default group, and of a smaller one whose ranks are numbered anew."""
    with joined(store, rank, world_size):
        with endpoint().create_from_process_group(dist.group.WORLD, writer_rank=1) as queue:
            all_of_them = (queue.rank, queue.broadcast_object({"from": rank} if queue.is_writer else None))
            dist.barrier()
        some = dist.new_group([1, 2], backend="gloo")
        if rank == 0:
            return [all_of_them, None]
        with endpoint().create_from_process_group(some, writer_rank=1) as queue:
            few = (queue.rank, queue.broadcast_object(torch.arange(3) if queue.is_writer else None).tolist())
            dist.barrier(some)
        return [all_of_them, few]


def is_left_alone(parent: peers.Parent, store: str, rank: int, world_size: int) -> Any:
    """A rank of a group whose last rank leaves instead; what is raised."""
    with joined(store, rank, world_size):
        dist.barrier()
        if rank == world_size - 1:
            return "left"
        try:
            endpoint().create_from_process_group(dist.group.WORLD)
        except Exception as e:
            return type(e).__name__
    return "made"


def all_ranks(what: Any, folder: Path, world_size: int = 3) -> list[Any]:
    """What each rank returned."""
    with contextlib.ExitStack() as stack:
        given = (str(folder / "store"),)
        ranks = [
            stack.enter_context(peers.start(what, *given, rank, world_size, timeout_s=LIFE_S, env=LOOPBACK))
            for rank in range(world_size)
        ]
        return [rank.result(LIFE_S) for rank in ranks]


@pytest.mark.full
def test_a_torch_group_makes_a_queue_from_one_rank_to_all_others(tmp_path: Path) -> None:
    of_all = {"from": 1}
    assert all_ranks(broadcasts, tmp_path) == [
        [(0, of_all), None],
        [(None, of_all), (0, [0, 1, 2])],
        [(2, of_all), (None, [0, 1, 2])],
    ]


@pytest.mark.full
def test_a_rank_of_a_torch_group_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    assert all_ranks(is_left_alone, tmp_path) == ["TransportError", "TransportError", "left"]


# -- one rank, in this process ---------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with joined(str(tmp_path / "store"), 0, 1):
        yield dist.group.WORLD


def test_what_is_too_long_is_refused_by_its_sender_and_by_its_receiver(alone: Any, monkeypatch: Any) -> None:
    ranks = _TorchRanks(alone)
    assert ranks.broadcast(("contact", "c"), 0) == ("contact", "c")
    with pytest.raises(CapacityError, match="at most 65536"):
        ranks.broadcast(bytes(1 << 17), 0)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, *_: tensor.fill_(1 << 60))
    with pytest.raises(WireError, match="65536 are the most allowed"):
        ranks.broadcast("a value", 0)
