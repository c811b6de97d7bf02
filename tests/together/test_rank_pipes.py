"""Pipes between the ranks of a group, over the transport that a config names."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from kvplug import Config, ConfigError, PluginError, StatelessGroup, build_pipe_endpoint, connect_ranks
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer

pytestmark = pytest.mark.timeout(60)

WORLD = 3


def rank_of(parent: peers.Parent, address: str, rank: int, transport: str) -> list[float]:
    config = Config(transport=transport, timeout_s=20)
    with StatelessGroup.create(address, rank=rank, world_size=WORLD) as group:
        pipes = connect_ranks(group, build_pipe_endpoint(config))
        sent = [pipe.send_tensor(torch.full((4,), float(rank))) for pipe in pipes.values()]
        got = [float(pipes[peer].recv_tensor()[0]) for peer in sorted(pipes)]
        for transfer in sent:
            transfer.wait(20)
        group.barrier()
        for pipe in pipes.values():
            pipe.close()
    return got


@pytest.mark.parametrize("transport", ["cpu", pytest.param("shm", marks=pytest.mark.full)])
def test_every_rank_has_a_pipe_to_every_other(transport: str, fork_server: ForkServer) -> None:
    given = f"unix:@kvplug-test-ranks-{transport}", transport
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                fork_server.start(f"{__file__}:rank_of", given[0], rank, given[1], timeout_s=50)
            )
            for rank in range(WORLD)
        ]
        assert [child.result(50) for child in children] == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"transport": "auto"}, ConfigError, "'auto' was given"),
        ({"transport": "cpu", "device": "cuda"}, PluginError, "no pipe is available"),
        (
            {"transport": "cpu", "sinks": ("log",)},
            ConfigError,
            "sinks: pipes between the ranks of a group are",
        ),
    ],
)
def test_what_ranks_cannot_agree_on_is_refused(
    given: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_pipe_endpoint(Config(**given))
