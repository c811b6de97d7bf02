"""The fake NCCL refuses what NCCL refuses, and waits where NCCL waits: tests over it depend on that."""

from __future__ import annotations

import pytest

import pynccl_ranks as ranks
from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl.abi import DataType, RedOp, Result
from kvplug_pynccl.nccl.errors import NcclInvalidArgumentError, NcclInvalidUsageError
from kvplug_pynccl.nccl.library import Library

PATIENCE_S, near, at, ints = ranks.PATIENCE_S, ranks.near, ranks.at, ranks.ints
I32 = DataType.INT32


def test_what_nccl_refuses_is_refused(nccl: Library) -> None:
    (me,) = near(nccl)
    data = ints(0)
    for count, dtype, peer in ((1, 99, 0), (1, I32, 7)):
        with pytest.raises(NcclInvalidArgumentError, match="invalid"):
            nccl.send(at(data), count, dtype, peer, me.comm, me.stream.handle)
    with pytest.raises(NcclInvalidUsageError, match="send to self without a matching recv"):
        nccl.send(at(data), 1, I32, 0, me.comm, me.stream.handle)
    with pytest.raises(NcclInvalidUsageError, match="not in a group"):
        nccl.group_end()
    nccl.comm_suspend(me.comm)
    with pytest.raises(NcclInvalidUsageError, match="suspended"):
        nccl.send(at(data), 1, I32, 0, me.comm, me.stream.handle)
    nccl.comm_resume(me.comm)
    me.stream.close()
    with pytest.raises(NcclInvalidArgumentError, match="is no stream"):
        nccl.recv(at(data), 1, I32, 0, me.comm, me.stream.handle)
    nccl.comm_abort(me.comm)
    for call in (nccl.comm_count, nccl.comm_abort):
        with pytest.raises(NcclInvalidArgumentError, match="corrupted comm"):
            call(me.comm)


def test_a_call_before_the_last_is_over_is_refused(nccl: Library, controls: fake.Controls) -> None:
    controls.set(polls=3)
    me = ranks.Rank(nccl, nccl.get_unique_id())
    with pytest.raises(NcclInvalidArgumentError, match="before the previous operation returned"):
        nccl.comm_count(me.comm)
    assert me.settled() == Result.SUCCESS
    mine = ints(1)
    arguments = (at(mine), at(mine), 1, I32, RedOp.SUM, me.comm, me.stream.handle)
    for _ in range(2):
        assert nccl.all_reduce(*arguments) == Result.IN_PROGRESS
        with pytest.raises(NcclInvalidArgumentError, match="before the previous operation returned"):
            nccl.all_reduce(*arguments)
        states = [nccl.comm_get_async_error(me.comm) for _ in range(4)]
        assert states == [*[Result.IN_PROGRESS] * 3, Result.SUCCESS]
    me.end()


def test_operations_of_one_communicator_wait_for_each_other_on_all_streams(
    nccl: Library, controls: fake.Controls
) -> None:
    one, other = near(nccl, 2)
    got, sent, back = ints(0), ints(5), ints(0)
    second = controls.stream()
    received = one.enqueue("recv", at(got), 1, I32, 1)
    nccl.send(at(sent), 1, I32, 1, one.comm, second.handle)
    assert one.settled() == Result.SUCCESS
    back_event = other.enqueue("recv", at(back), 1, I32, 0)
    assert not other.stream.wait(back_event, 0.05)  # what was to be sent waits for what was to be received
    assert not second.is_done(second.record()) and not one.stream.is_done(received)
    for each in (one, other):
        nccl.comm_abort(each.comm)
    assert all(each.synchronize(PATIENCE_S) for each in (one.stream, second, other.stream)) and back[0] == 0
