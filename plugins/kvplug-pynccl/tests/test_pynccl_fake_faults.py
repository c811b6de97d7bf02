"""The fake NCCL fails as it is asked to, and peers of it die, stop and hang."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import pynccl_ranks as ranks
from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl.abi import DataType, RedOp, Result
from kvplug_pynccl.nccl.errors import (
    NcclRemoteError,
    NcclSystemError,
)
from kvplug_pynccl.nccl.library import Library
from kvplug_testing import peers

StartRanks = Callable[..., list[peers.Peer]]
PATIENCE_S, near = ranks.PATIENCE_S, ranks.near


@pytest.mark.parametrize("result", [Result.REMOTE_ERROR, Result.SYSTEM_ERROR])
def test_a_peer_that_is_killed_shows_as_an_error_and_the_operation_ends_by_an_abort(
    result: Result, start_ranks: StartRanks
) -> None:
    waiting, killed = start_ranks(
        "receive_what_never_comes",
        "wait_to_be_killed",
        environments=[fake.NCCL.environment(peer_result=result)],
    )
    assert (waiting.recv(), killed.recv()) == ("waits", "is there")
    killed.kill()
    waiting.send("fails")
    state, was_done, ended, left, said = waiting.result(PATIENCE_S)
    assert (state, was_done, ended, left) == (result, False, True, 0) and "rank 1 is gone" in said


def test_a_peer_that_is_killed_may_show_as_nothing_at_all(start_ranks: StartRanks) -> None:
    waiting, killed = start_ranks(
        "receive_what_never_comes", "wait_to_be_killed", environments=[fake.NCCL.environment(peer_result=0)]
    )
    assert (waiting.recv(), killed.recv()) == ("waits", "is there")
    killed.kill()
    waiting.send("hangs")
    state, was_done, ended, left, _ = waiting.result(PATIENCE_S)
    assert (state, was_done, ended, left) == (Result.SUCCESS, False, True, 0)


def test_one_of_four_is_killed_and_the_others_are_told(start_ranks: StartRanks) -> None:
    *others, killed = start_ranks(*["reduce_when_told"] * 3, "wait_to_be_killed")
    assert killed.recv() == "is there"
    killed.kill()
    for other in others:
        other.send("now")
    for other in others:
        assert other.result(PATIENCE_S) == [Result.REMOTE_ERROR, 0, 1]


def test_a_peer_that_is_stopped_is_waited_for(start_ranks: StartRanks) -> None:
    waiting, stopped = start_ranks("reduce_when_told", "reduce_when_told")
    stopped.send("now")
    time.sleep(0.1)
    stopped.stop()
    waiting.send("now")
    time.sleep(0.2)
    assert waiting.exit_code is None
    stopped.cont()
    assert waiting.result(PATIENCE_S) == stopped.result(PATIENCE_S) == [Result.SUCCESS, 1, 1]


def test_a_peer_may_die_inside_an_operation(start_ranks: StartRanks) -> None:
    receiving, dying = start_ranks(
        "receive_a_lot", "send_a_lot", environments=[{}, fake.NCCL.environment(exit_after=0)]
    )
    assert dying.wait() == -9
    state, was_done, ended = receiving.result(PATIENCE_S)
    assert (state, was_done, ended) == (Result.REMOTE_ERROR, 0, 1)


def test_an_operation_that_never_ends_ends_by_an_abort(
    fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    made = near(fake_path, nccl, 2)
    data = [ranks.ints(1), ranks.ints(2)]
    controls.set(hang_after=controls.get("operations") + 2)
    for _ in range(2):
        events = [
            each.enqueue("all_reduce", ranks.at(mine), ranks.at(mine), 1, DataType.INT32, RedOp.SUM)
            for each, mine in zip(made, data, strict=True)
        ]
        done = [each.stream.wait(event, 0.2) for each, event in zip(made, events, strict=True)]
    assert done == [False, False]
    assert [nccl.comm_get_async_error(each.comm) for each in made] == [Result.SUCCESS] * 2
    for each in made:
        nccl.comm_abort(each.comm)
    assert all(each.stream.synchronize(PATIENCE_S) for each in made)
    assert [mine[0] for mine in data] == [3, 3]


def test_a_communicator_fails_after_so_many_operations(
    fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    (me,) = near(fake_path, nccl, 1)
    data = ranks.ints(1)
    controls.set(fail_after=controls.get("operations") + 1)
    arguments = (ranks.at(data), ranks.at(data), 1, DataType.INT32, RedOp.SUM, me.comm, me.stream.handle)
    nccl.all_reduce(*arguments)
    assert me.until_failed() == Result.REMOTE_ERROR
    assert me.stream.synchronize(PATIENCE_S)  # that one was done
    with pytest.raises(NcclRemoteError, match="asked to fail"):
        nccl.raise_for(nccl.comm_get_async_error(me.comm), "the communicator")
    with pytest.raises(NcclRemoteError):
        nccl.all_reduce(*arguments)
    nccl.comm_abort(me.comm)


def test_a_call_may_fail_at_once(fake_path: str, nccl: Library, controls: fake.Controls) -> None:
    (me,) = near(fake_path, nccl, 1)
    data = ranks.ints(1)
    controls.set(call_result=Result.SYSTEM_ERROR)
    with pytest.raises(NcclSystemError):
        nccl.all_reduce(
            ranks.at(data), ranks.at(data), 1, DataType.INT32, RedOp.SUM, me.comm, me.stream.handle
        )
    controls.set(call_result=0)
    me.end()


def test_ranks_that_move_different_amounts_wait_for_ever(fake_path: str, nccl: Library) -> None:
    one, other = near(fake_path, nccl, 2)
    data = ranks.ints(1, 2, 3)
    events = [
        (one.stream, one.enqueue("send", ranks.at(data), 3, DataType.INT32, 1)),
        (other.stream, other.enqueue("recv", ranks.at(data), 2, DataType.INT32, 0)),
    ]
    assert not events[1][0].wait(events[1][1], 0.1)
    nccl.comm_abort(other.comm)
    nccl.comm_abort(one.comm)
    assert all(stream.wait(event, PATIENCE_S) for stream, event in events)


def test_an_abort_leaves_nothing(fake_path: str, nccl: Library, controls: fake.Controls) -> None:
    with peers.nothing_left():
        for aborted in (False, True):
            made = near(fake_path, nccl, 3)
            data = ranks.ints(1)
            if aborted:
                made[0].enqueue("recv", ranks.at(data), 1, DataType.INT32, 1)
                for each in made:
                    nccl.comm_abort(each.comm)
            else:
                for each in made:
                    nccl.comm_finalize(each.comm)
                for each in made:
                    assert each.settled() == Result.SUCCESS
                    nccl.comm_destroy(each.comm)
            for each in made:
                each.stream.close()


def test_a_communicator_may_never_be_finalized(
    fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    (me,) = near(fake_path, nccl, 1)
    controls.set(finalize_hangs=1)
    assert nccl.comm_finalize(me.comm) == Result.IN_PROGRESS
    with pytest.raises(AssertionError, match="still in progress"):
        me.settled(0.1)
    nccl.comm_abort(me.comm)
