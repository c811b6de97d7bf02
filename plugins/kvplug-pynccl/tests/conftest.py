"""The fake NCCL, compiled once, and processes that are its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvplug_lab.gpu import fake
from kvplug_lab.gpu.fixtures import fixtures_of
from kvplug_pynccl.nccl.library import Library, load
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer

RANKS = Path(__file__).with_name("pynccl_ranks.py")

fake_path, controls = fixtures_of(fake.NCCL)


@pytest.fixture
def nccl(fake_path: str, controls: fake.Controls) -> Library:
    return load(fake_path)


@pytest.fixture
def start_ranks(
    fake_path: str, nccl: Library, fork_server: ForkServer
) -> Iterator[Callable[..., list[peers.Peer]]]:
    """Starts a process for each named function of ranks.py, each with its own environment."""
    with ExitStack() as stack:

        def start(*functions: str, environments: Any = (), world_sizes: Any = ()) -> list[peers.Peer]:
            unique_id = bytes(nccl.get_unique_id())
            world_sizes = world_sizes or [len(functions)] * len(functions)
            environments = [*environments, *[{}] * (len(functions) - len(environments))]
            return [
                stack.enter_context(
                    fork_server.start(
                        f"{RANKS}:in_child",
                        *(fake_path, unique_id, world_sizes[rank], rank, function, environments[rank]),
                        timeout_s=120.0,
                    )
                )
                for rank, function in enumerate(functions)
            ]

        yield start
