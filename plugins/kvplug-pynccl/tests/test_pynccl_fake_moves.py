"""The fake NCCL moves and reduces what NCCL does, in the order of its streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pynccl_ranks as ranks
from kvplug import ClosedError
from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl.abi import DataType, RedOp, Result
from kvplug_pynccl.nccl.dtypes import reduced_as
from kvplug_pynccl.nccl.errors import (
    NcclInvalidArgumentError,
    NcclInvalidUsageError,
    NcclSystemError,
)
from kvplug_pynccl.nccl.library import Library
from kvplug_testing import peers

StartRanks = Callable[..., list[peers.Peer]]
PATIENCE_S, near = ranks.PATIENCE_S, ranks.near

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
