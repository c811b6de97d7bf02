"""Contacts cross the group, pipes come out: those of the kit, within this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvplug.errors import KvplugError, TimeoutError, TransportError  # noqa: E402 - after the skip
from kvplug.transport import Credentials, PipeEndpoint  # noqa: E402
from kvplug.transport.group.group import StatelessGroup  # noqa: E402
from kvplug.transport.group.mesh import connect_ranks  # noqa: E402
from kvplug_testing.groups import local_groups  # noqa: E402
from kvplug_testing.memory.options import MemoryPipeOptions  # noqa: E402
from kvplug_testing.memory.pipe import MemoryEndpoint  # noqa: E402

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]


CONTEXT = PipeEndpoint.Context(options=MemoryPipeOptions(), credentials=Credentials())


class DeafEndpoint(MemoryEndpoint):
    def listen(self) -> Any:
        raise TransportError("no room to listen")


def in_threads(world_size: int, work: Any) -> list[Any]:
    def run(group: StatelessGroup) -> Any:
        result = work(group)
        group.barrier()
        return result

    with local_groups(20) as make, ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, make(world_size)))


def test_the_peer_of_a_rank_that_cannot_listen_gets_the_reason() -> None:
    def work(group: StatelessGroup) -> str:
        try:
            connect_ranks(group, DeafEndpoint(CONTEXT), timeout=10)
        except KvplugError as e:
            return f"{type(e).__name__}: {e}"
        return "connected"

    assert in_threads(2, work) == [
        "TransportError: no room to listen",
        "TransportError: rank 0 cannot listen: no room to listen",
    ]


def test_a_peer_that_does_not_name_us_is_a_timeout_and_no_pipe_is_left() -> None:
    def work(group: StatelessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(TimeoutError, match="no pipe to rank 2: "):
                connect_ranks(group, MemoryEndpoint(CONTEXT), [1, 2], timeout=1)
        elif group.rank == 1:
            connect_ranks(group, MemoryEndpoint(CONTEXT), [0], timeout=10)[0].close()

    in_threads(3, work)
