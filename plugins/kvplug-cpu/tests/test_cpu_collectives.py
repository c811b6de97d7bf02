"""Collectives of the communicator "cpu" between threads: who leaves, and who does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import cpu_ranks
from communicator_ranks import at_all
from kvplug import PeerGoneError, StatelessGroup, TimeoutError, TransportError, UnsupportedError
from kvplug.transport import Mesh, TensorMismatchError
from kvplug_cpu.communicator import CpuCommunicator

Make = Callable[..., list[CpuCommunicator]]
PATIENCE_S = 30.0


@pytest.fixture
def communicators(groups: Callable[[int], list[StatelessGroup]]) -> Iterator[Make]:
    """Makes every rank's end; ``of(rank)`` are fields of its context."""
    with ExitStack() as stack:

        def make(
            world_size: int, of: Callable[[int], dict[str, Any]] = lambda _: {}
        ) -> list[CpuCommunicator]:
            made = at_all(groups(world_size), lambda group: cpu_ranks.make(group, **of(group.rank)))
            for each in made:
                assert isinstance(each, CpuCommunicator), each
                stack.callback(each.destroy)
            return made

        yield make


def total(end: CpuCommunicator) -> float:
    return end.all_reduce(torch.ones(1)).item()


# -- who leaves ------------------------------------------------------------------------------------


def test_a_rank_that_leaves_when_it_is_done_spoils_nothing_for_those_who_are_slower(
    communicators: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = communicators(3)
    receive, left, here = Mesh.recv, threading.Event(), threading.local()

    def late(*args: Any) -> Any:
        assert here.rank != 1 or left.wait(PATIENCE_S)
        return receive(*args)

    monkeypatch.setattr(Mesh, "recv", late)

    def call(end: CpuCommunicator) -> Any:
        here.rank = end.rank
        found = end.broadcast(torch.full((4,), float(end.rank)), 0)
        if end.rank == 2:
            end.destroy()
            left.set()
        return found.tolist()

    assert at_all(made, call) == [[0.0] * 4] * 3


def test_a_rank_that_has_left_is_missed_by_the_next_collective_and_by_no_others(communicators: Make) -> None:
    made = communicators(3)
    assert at_all(made, total) == [3.0] * 3
    made[2].destroy()

    def pass_on(end: CpuCommunicator) -> Any:
        return end.recv((2,), torch.float32, 0).tolist() if end.rank else end.send(torch.ones(2), 1)

    assert at_all(made[:2], pass_on) == [None, [1.0, 1.0]]
    for error in at_all(made[:2], total):
        assert isinstance(error, PeerGoneError)
        assert "rank 2" in str(error)


# -- who does something else -----------------------------------------------------------------------


def sends_or_sums(end: CpuCommunicator) -> Any:
    return end.all_reduce(torch.ones(2)) if end.rank else end.send(torch.ones(2), 1)


def test_all_hear_at_once_that_one_sends_where_the_others_sum(communicators: Make) -> None:
    made = communicators(3)
    found = at_all(made, sends_or_sums)
    assert isinstance(found[0], TensorMismatchError), found
    assert isinstance(found[2], TransportError) and not isinstance(found[2], TimeoutError), found
    assert "rank 0" in str(found[2])
    for error in at_all(made, total):
        assert isinstance(error, TransportError), found


def test_ranks_that_have_other_sizes_of_data_parallelism_are_refused(communicators: Make) -> None:
    made = communicators(4, lambda rank: {"unique_name": "ep", "data_parallel_size": 4 if rank else 2})
    for error in at_all(made, lambda end: end.dispatch_router_logits(torch.ones(2, 4), torch.ones(2, 3))):
        assert isinstance(error, TensorMismatchError)
        assert "data_parallel_size 4" in str(error)
    assert at_all(made, total) == [4.0] * 4


@pytest.mark.parametrize("method", ["all_reduce", "broadcast"])
def test_what_cannot_be_filled_is_refused_before_anything_is_begun(communicators: Make, method: str) -> None:
    made = communicators(2)
    with torch.inference_mode():
        not_here = torch.ones(3)
    for wrong in (torch.ones(1).expand(3), torch.ones(3).to_sparse(), not_here):
        for error in at_all(made, lambda end: getattr(end, method)(wrong)):  # noqa: B023
            assert isinstance(error, UnsupportedError)
    assert at_all(made, lambda end: end.all_gather(torch.ones(1).expand(2)).tolist()) == [[1.0] * 4] * 2
