"""The fake NCCL does what NCCL does, in real processes, and fails as it is asked to."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplug import ClosedError
from kvplug.testing import peers
from kvplug_pynccl.nccl.abi import DataType, RedOp, Result
from kvplug_pynccl.nccl.dtypes import reduced_as
from kvplug_pynccl.nccl.errors import (
    NcclInvalidArgumentError,
    NcclInvalidUsageError,
    NcclRemoteError,
    NcclSystemError,
)
from kvplug_pynccl.nccl.library import Library
from kvplug_pynccl.testing import fake

ranks = SimpleNamespace(**run_path(str(Path(__file__).with_name("ranks.py"))))
StartRanks = Callable[..., list[peers.Peer]]
PATIENCE_S = ranks.PATIENCE_S


def near(fake_path: str, nccl: Library, world_size: int) -> list[Any]:
    """All ranks in this process."""
    unique_id = bytes(nccl.get_unique_id())
    made = [ranks.Rank(fake_path, unique_id, world_size, rank) for rank in range(world_size)]
    assert [each.settled() for each in made] == [Result.SUCCESS] * world_size
    return made


# -- the source ------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_the_source_gives_no_warning(tmp_path: Path) -> None:
    sources = sorted((Path(fake.__file__).parent / "native").glob("*.c"))
    flags = [*fake.FLAGS, "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    subprocess.run(["cc", *flags, "-o", str(tmp_path / "fake.so"), *sources, "-lm"], check=True, timeout=120)


def test_without_a_compiler_it_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(OSError, match="no-such-compiler"):
        fake.build(tmp_path)


def test_a_fault_that_there_is_not_is_refused(controls: fake.Controls, fake_path: str) -> None:
    with pytest.raises(LookupError, match="the fake has no fial_after"):
        controls.set(fial_after=1)
    with pytest.raises(LookupError, match="the fake has no nothing"):
        controls.get("nothing")
    loading = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", fake_path]
    misspelt = {**os.environ, **fake.environment(polls=2, fial_after=1)}
    done = subprocess.run(loading, env=misspelt, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGABRT and "what is fial_after=1?" in done.stderr


# -- what is moved ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_processes_do_every_collective(world_size: int, start_ranks: StartRanks) -> None:
    n = world_size
    children = start_ranks(*["all_collectives"] * n)
    for r, child in enumerate(children):
        got = child.result(PATIENCE_S)
        each_sum = n * (n + 1) // 2
        assert got == {
            "all_reduce": [each_sum, 10 * each_sum],
            "all_reduce in place": [n, 10 * n],
            "reduce": [1, -(n - 1)] if r == n - 1 else [7, 7],
            "all_gather": [value for rank in range(n) for value in (rank + 1, -rank)],
            "all_gather in place": [*range(n)],
            "reduce_scatter": [sum(100 * rank + 2 * r + place for rank in range(n)) for place in range(2)],
            "broadcast": [0, 1],
            "neighbours": [(r - 1) % n, (r + 1) % n],
            "asked": [n, r],
            "left": [0],
        }


def test_more_than_a_socket_holds_crosses_both_ways_at_once(start_ranks: StartRanks) -> None:
    children = start_ranks("large_both_ways", "large_both_ways")
    assert [child.result(PATIENCE_S) for child in children] == [True, True]


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
TORCH = {
    RedOp.SUM: lambda all_: all_.sum(0),
    RedOp.PROD: lambda all_: all_.prod(0),
    RedOp.MAX: lambda all_: all_.amax(0),
    RedOp.MIN: lambda all_: all_.amin(0),
    RedOp.AVG: lambda all_: all_.sum(0) / 3,
}


@pytest.mark.parametrize("op", RedOp, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_what_is_reduced_is_what_torch_makes_of_it(
    dtype: torch.dtype, op: RedOp, fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    generator = torch.Generator().manual_seed(op)
    if dtype in FLOATS:
        inputs = (torch.randn(3, 257, generator=generator, dtype=torch.float64) * 3).to(dtype)
        expected = TORCH[op](inputs.to(torch.float64)).to(dtype)
    else:
        inputs = torch.randint(0 if dtype == torch.uint8 else -5, 6, (3, 257), generator=generator).to(dtype)
        whole = TORCH[op](inputs.to(torch.int64))
        expected = (whole.trunc() if op == RedOp.AVG else whole).to(dtype)
    outputs = torch.zeros_like(inputs)
    made = near(fake_path, nccl, 3)
    carried = reduced_as(dtype, op, nccl.version)
    for each in made:
        each.enqueue(
            "all_reduce", inputs[each.rank].data_ptr(), outputs[each.rank].data_ptr(), 257, carried, op
        )
    for each in made:
        assert each.stream.synchronize(PATIENCE_S)
        assert torch.equal(outputs[each.rank].view(torch.uint8), expected.view(torch.uint8))
        nccl.comm_abort(each.comm)
        each.stream.close()


def test_unsigned_integers_are_compared_as_what_they_are(fake_path: str, nccl: Library) -> None:
    made = near(fake_path, nccl, 2)
    values = [(1 << 63) + 5, 7]
    for dtype, kind in ((DataType.UINT64, ranks.ctypes.c_uint64), (DataType.UINT32, ranks.ctypes.c_uint32)):
        inputs = [(kind * 1)(value) for value in values]
        outputs = [(kind * 1)(0) for _ in values]
        for each, mine, out in zip(made, inputs, outputs, strict=True):
            each.enqueue("all_reduce", ranks.at(mine), ranks.at(out), 1, dtype, RedOp.MAX)
        assert all(each.stream.synchronize(PATIENCE_S) for each in made)
        assert {out[0] for out in outputs} == {max(mine[0] for mine in inputs)}
    for each in made:
        nccl.comm_abort(each.comm)


def test_what_is_sent_to_oneself_needs_a_group(fake_path: str, nccl: Library) -> None:
    (me,) = near(fake_path, nccl, 1)
    first, second, got, more = ranks.ints(1), ranks.ints(2), ranks.ints(0), ranks.ints(0)
    with pytest.raises(NcclInvalidUsageError, match="send to self without a matching recv"):
        nccl.send(ranks.at(first), 1, DataType.INT32, 0, me.comm, me.stream.handle)
    nccl.group_start()
    for buffer, call in ((first, nccl.send), (second, nccl.send), (got, nccl.recv), (more, nccl.recv)):
        call(ranks.at(buffer), 1, DataType.INT32, 0, me.comm, me.stream.handle)
    assert nccl.group_end() == Result.IN_PROGRESS
    assert me.settled() == Result.SUCCESS and me.stream.synchronize(PATIENCE_S)
    assert (got[0], more[0]) == (1, 2)
    me.end()


def test_a_communicator_may_block(fake_path: str, nccl: Library, controls: fake.Controls) -> None:
    comm = nccl.comm_init_rank(1, nccl.get_unique_id(), 0)
    stream, mine, got = controls.stream(), ranks.ints(3), ranks.ints(0)
    assert nccl.comm_get_async_error(comm) == Result.SUCCESS
    arguments = (ranks.at(mine), ranks.at(got), 1, DataType.INT32, RedOp.SUM, comm, stream.handle)
    assert nccl.all_reduce(*arguments) == Result.SUCCESS
    assert stream.synchronize(PATIENCE_S) and got[0] == 3
    assert nccl.comm_finalize(comm) == Result.SUCCESS
    assert nccl.comm_destroy(comm) == Result.SUCCESS
    controls.set(init_result=Result.SYSTEM_ERROR)
    before = controls.get("communicators")
    with pytest.raises(NcclSystemError, match="ncclCommInitRank gave ncclSystemError"):
        nccl.comm_init_rank(1, nccl.get_unique_id(), 0)
    assert controls.get("communicators") == before


# -- order -----------------------------------------------------------------------------------------------


def test_a_call_before_the_last_is_over_is_refused(
    fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    controls.set(polls=3)
    me = ranks.Rank(fake_path, bytes(nccl.get_unique_id()), 1, 0)
    with pytest.raises(NcclInvalidArgumentError, match="before the previous operation returned"):
        nccl.comm_count(me.comm)
    assert me.settled() == Result.SUCCESS
    mine = ranks.ints(1)
    arguments = (ranks.at(mine), ranks.at(mine), 1, DataType.INT32, RedOp.SUM, me.comm, me.stream.handle)
    assert nccl.all_reduce(*arguments) == Result.IN_PROGRESS
    with pytest.raises(NcclInvalidArgumentError, match="before the previous operation returned"):
        nccl.all_reduce(*arguments)
    states = [nccl.comm_get_async_error(me.comm) for _ in range(4)]
    assert states == [*[Result.IN_PROGRESS] * 3, Result.SUCCESS]
    assert nccl.all_reduce(*arguments) == Result.IN_PROGRESS
    assert me.settled() == Result.SUCCESS
    me.end()


def test_operations_of_one_communicator_wait_for_each_other_on_all_streams(
    fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    one, other = near(fake_path, nccl, 2)
    got, sent, back = ranks.ints(0), ranks.ints(5), ranks.ints(0)
    second = controls.stream()
    received = one.enqueue("recv", ranks.at(got), 1, DataType.INT32, 1)
    nccl.send(ranks.at(sent), 1, DataType.INT32, 1, one.comm, second.handle)
    assert one.settled() == Result.SUCCESS
    back_event = other.enqueue("recv", ranks.at(back), 1, DataType.INT32, 0)
    assert not other.stream.wait(back_event, 0.05)  # what was to be sent waits for what was to be received
    assert not second.is_done(second.record()) and not one.stream.is_done(received)
    for each in (one, other):
        nccl.comm_abort(each.comm)
    assert one.stream.synchronize(PATIENCE_S) and second.synchronize(PATIENCE_S)
    assert other.stream.synchronize(PATIENCE_S) and back[0] == 0


def test_what_is_on_a_stream_is_done_in_order(fake_path: str, nccl: Library, controls: fake.Controls) -> None:
    one, other = near(fake_path, nccl, 2)
    source, staged, landed, copied = ranks.ints(9), ranks.ints(0), ranks.ints(0), ranks.ints(0)
    controls.set(hold=1)
    one.stream.copy(ranks.at(staged), ranks.at(source), 4)
    sent = one.enqueue("send", ranks.at(staged), 1, DataType.INT32, 1)
    received = other.enqueue("recv", ranks.at(landed), 1, DataType.INT32, 0)
    beside = controls.stream()
    beside.wait_for(other.stream, received)
    beside.copy(ranks.at(copied), ranks.at(landed), 4)
    assert not one.stream.is_done(sent) and not beside.synchronize(0.05)
    controls.set(hold=0)
    assert beside.synchronize(PATIENCE_S) and copied[0] == 9
    for each in (one, other):
        nccl.comm_abort(each.comm)


def test_a_group_holds_all_its_streams(fake_path: str, nccl: Library, controls: fake.Controls) -> None:
    (me,) = near(fake_path, nccl, 1)
    second, mine, got = controls.stream(), ranks.ints(4), ranks.ints(0)
    controls.set(hold=1)
    nccl.group_start()
    nccl.send(ranks.at(mine), 1, DataType.INT32, 0, me.comm, me.stream.handle)
    nccl.recv(ranks.at(got), 1, DataType.INT32, 0, me.comm, second.handle)
    nccl.group_end()
    assert me.settled() == Result.SUCCESS
    events = [(stream, stream.record()) for stream in (me.stream, second)]
    assert not any(stream.is_done(event) for stream, event in events)
    controls.set(hold=0)
    assert all(stream.wait(event, PATIENCE_S) for stream, event in events) and got[0] == 4
    nccl.comm_abort(me.comm)


def test_a_stream_that_is_closed_does_what_it_has_and_takes_no_more(
    controls: fake.Controls, nccl: Library
) -> None:
    with peers.nothing_left():
        stream, source, landed = controls.stream(), ranks.ints(3), ranks.ints(0)
        stream.copy(ranks.at(landed), ranks.at(source), 4)
        event = stream.record()
        assert stream.wait(event, PATIENCE_S) and landed[0] == 3
        stream.close()
        stream.close()
        with pytest.raises(ClosedError):
            stream.record()
        with pytest.raises(ClosedError):
            stream.copy(ranks.at(landed), ranks.at(source), 4)
    (me,) = near(nccl.path, nccl, 1)
    with pytest.raises(NcclInvalidArgumentError, match="is no stream"):
        nccl.recv(ranks.at(landed), 1, DataType.INT32, 0, me.comm, stream.handle)
    nccl.comm_abort(me.comm)


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
    hangs, goes_on = fake.environment(init_hangs=1), fake.environment(init_hangs=0)
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
    failing = fake.environment(init_result=Result.SYSTEM_ERROR)
    children = start_ranks("start", "start", environments=[failing, failing])
    for child in children:
        assert child.recv() == "has begun"
        child.send("settle")
    assert [child.result(PATIENCE_S)[0] for child in children] == [Result.SYSTEM_ERROR] * 2


# -- faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [Result.REMOTE_ERROR, Result.SYSTEM_ERROR])
def test_a_peer_that_is_killed_shows_as_an_error_and_the_operation_ends_by_an_abort(
    result: Result, start_ranks: StartRanks
) -> None:
    waiting, killed = start_ranks(
        "receive_what_never_comes",
        "wait_to_be_killed",
        environments=[fake.environment(peer_result=result)],
    )
    assert (waiting.recv(), killed.recv()) == ("waits", "is there")
    killed.kill()
    waiting.send("fails")
    state, was_done, ended, left, said = waiting.result(PATIENCE_S)
    assert (state, was_done, ended, left) == (result, False, True, 0) and "rank 1 is gone" in said


def test_a_peer_that_is_killed_may_show_as_nothing_at_all(start_ranks: StartRanks) -> None:
    waiting, killed = start_ranks(
        "receive_what_never_comes", "wait_to_be_killed", environments=[fake.environment(peer_result=0)]
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
        "receive_a_lot", "send_a_lot", environments=[{}, fake.environment(exit_after=0)]
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
