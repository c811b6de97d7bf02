"""The fake NCCL starts in real processes, and refuses what NCCL refuses."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import pynccl_ranks as ranks
from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl.abi import DataType, Result
from kvplug_pynccl.nccl.errors import (
    NcclInvalidArgumentError,
    NcclInvalidUsageError,
)
from kvplug_pynccl.nccl.library import Library
from kvplug_testing import peers

StartRanks = Callable[..., list[peers.Peer]]
PATIENCE_S, near = ranks.PATIENCE_S, ranks.near

# -- what is refused -------------------------------------------------------------------------------------


def test_bad_arguments_are_refused(fake_path: str, nccl: Library) -> None:
    (me,) = near(fake_path, nccl, 1)
    data = ranks.ints(0)
    for count, dtype, peer in ((1, 99, 0), (1, DataType.INT32, 7)):
        with pytest.raises(NcclInvalidArgumentError, match="invalid"):
            nccl.send(ranks.at(data), count, dtype, peer, me.comm, me.stream.handle)
    with pytest.raises(NcclInvalidUsageError, match="not in a group"):
        nccl.group_end()
    nccl.comm_abort(me.comm)
    with pytest.raises(NcclInvalidArgumentError, match="corrupted comm"):
        nccl.comm_count(me.comm)
    with pytest.raises(NcclInvalidArgumentError):
        nccl.comm_abort(me.comm)
    with pytest.raises(NcclInvalidArgumentError, match="NULL"):
        nccl.comm_count(0)
    with pytest.raises(NcclInvalidArgumentError):
        nccl.comm_init_rank(2, nccl.get_unique_id(), 2)


def test_an_error_in_a_group_is_given_again_at_its_end(fake_path: str, nccl: Library) -> None:
    (me,) = near(fake_path, nccl, 1)
    data = ranks.ints(0)
    nccl.group_start()
    nccl.send(ranks.at(data), 1, DataType.INT32, 0, me.comm, me.stream.handle)
    with pytest.raises(NcclInvalidArgumentError):
        nccl.recv(ranks.at(data), 1, DataType.INT32, 5, me.comm, me.stream.handle)
    with pytest.raises(NcclInvalidArgumentError, match="ncclGroupEnd"):
        nccl.group_end()
    assert me.stream.synchronize(PATIENCE_S)  # nothing of it was enqueued
    me.end()


def test_newer_functions_are_there(fake_path: str, nccl: Library) -> None:
    (me,) = near(fake_path, nccl, 1)
    data = ranks.ints(0)
    nccl.comm_suspend(me.comm)
    with pytest.raises(NcclInvalidUsageError, match="suspended"):
        nccl.send(ranks.at(data), 1, DataType.INT32, 0, me.comm, me.stream.handle)
    nccl.comm_resume(me.comm)
    window, result = nccl.comm_window_register(me.comm, ranks.at(data), 4)
    assert (window.value, result) == (ranks.at(data), Result.SUCCESS)
    nccl.comm_window_deregister(me.comm, window.value)
    properties = nccl.comm_query_properties(me.comm)
    assert (properties.rank, properties.nRanks) == (0, 1)
    me.end()


# -- the start -------------------------------------------------------------------------------------------


def test_two_ranks_on_one_gpu_are_told(start_ranks: StartRanks) -> None:
    same = {fake.GPU_VARIABLE: "1000"}
    children = start_ranks("start", "start", environments=[same, same])
    for child in children:
        assert child.recv() == "has begun"
        child.send("settle")
    for child in children:
        state, said, left = child.result(PATIENCE_S)
        assert (state, left) == (Result.INVALID_USAGE, 0) and "Duplicate GPU" in said


def test_two_ranks_on_one_gpu_of_two_hosts_are_none(start_ranks: StartRanks) -> None:
    same = [{fake.GPU_VARIABLE: "1000", "NCCL_HOSTID": host} for host in "ab"]
    children = start_ranks("start", "start", environments=same)
    for child in children:
        assert child.recv() == "has begun"
        child.send("settle")
    assert [child.result(PATIENCE_S)[0] for child in children] == [Result.SUCCESS] * 2


@pytest.mark.parametrize("why", ["the first hangs", "the last hangs", "they disagree"])
def test_a_start_that_does_not_end_is_aborted(why: str, start_ranks: StartRanks) -> None:
    hangs, goes_on = fake.NCCL.environment(init_hangs=1), fake.NCCL.environment(init_hangs=0)
    children = {
        "the first hangs": lambda: start_ranks("start", "start", environments=[hangs, goes_on]),
        "the last hangs": lambda: start_ranks("start", "start", environments=[goes_on, hangs]),
        "they disagree": lambda: start_ranks("start", "start", world_sizes=[2, 3]),
    }[why]()
    for child in children:
        assert child.recv() == "has begun"
    time.sleep(0.2)  # they are looking for each other, or were looking
    for child in children:
        child.send("abort")
    for child in children:
        state, _, left = child.result(PATIENCE_S)
        assert (state, left) == (Result.IN_PROGRESS, 0)


def test_a_start_may_fail(start_ranks: StartRanks) -> None:
    failing = fake.NCCL.environment(init_result=Result.SYSTEM_ERROR)
    children = start_ranks("start", "start", environments=[failing, failing])
    for child in children:
        assert child.recv() == "has begun"
        child.send("settle")
    assert [child.result(PATIENCE_S)[0] for child in children] == [Result.SYSTEM_ERROR] * 2
