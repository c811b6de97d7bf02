"""The fake NCCL, compiled once, and processes that are ranks of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvplug_pynccl.nccl.library import Library, load
from kvplug_pynccl.testing import fake
from kvplug_testing import peers

RANKS = Path(__file__).with_name("ranks.py")


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) for the fake NCCL")
    return fake.build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def controls(fake_path: str) -> Iterator[fake.Controls]:
    """The fake's in this process; whatever a test sets is taken back."""
    made = fake.Controls(fake_path)
    names = (
        "version",
        "polls",
        "hold",
        "call_result",
        "call_hangs",
        "init_hangs",
        "init_result",
        "begin_result",
        "fail_after",
        "fail_result",
    )
    names += ("hang_after", "exit_after", "peer_result", "finalize_hangs", "abort_hangs")
    before = {name: made.get(name) for name in names}
    yield made
    made.set(**before)


@pytest.fixture
def nccl(fake_path: str, controls: fake.Controls) -> Library:
    return load(fake_path)


@pytest.fixture
def start_ranks(fake_path: str, nccl: Library) -> Iterator[Callable[..., list[peers.Peer]]]:
    """Starts a process for each function of ranks.py that is named, with an environment of its own."""
    with ExitStack() as stack:

        def start(*functions: str, environments: Any = (), world_sizes: Any = ()) -> list[peers.Peer]:
            unique_id = bytes(nccl.get_unique_id())
            world_sizes = world_sizes or [len(functions)] * len(functions)
            environments = [*environments, *[{}] * (len(functions) - len(environments))]
            return [
                stack.enter_context(
                    peers.start(
                        f"{RANKS}:in_child",
                        *(fake_path, unique_id, world_sizes[rank], rank, function),
                        timeout_s=120.0,
                        env=environments[rank],
                    )
                )
                for rank, function in enumerate(functions)
            ]

        yield start
