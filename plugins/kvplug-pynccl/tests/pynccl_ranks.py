"""Ranks of the fake NCCL for tests: in processes of their own, or several in one."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

from kvplug_lab.gpu.fake import Controls, Stream
from kvplug_pynccl.nccl.abi import DataType, RedOp, Result, UniqueId
from kvplug_pynccl.nccl.library import Library, load
from kvplug_testing import peers

PATIENCE_S = 60.0


class Rank:
    """A non-blocking communicator, its stream, and waits with a deadline."""

    def __init__(self, path: str, unique_id: bytes, world_size: int, rank: int) -> None:
        self.nccl: Library = load(path)
        self.controls = Controls(path)
        self.stream: Stream = self.controls.stream()
        self.world_size, self.rank = world_size, rank
        self.comm, self.began = self.nccl.comm_init_rank_config(
            world_size, UniqueId.of(unique_id), rank, self.nccl.config(blocking=0)
        )

    def settled(self, timeout: float = PATIENCE_S) -> int:
        """The communicator's state once it is in progress no more."""
        limit = time.monotonic() + timeout
        while (state := self.nccl.comm_get_async_error(self.comm)) == Result.IN_PROGRESS:
            assert time.monotonic() < limit, "it is still in progress"
            time.sleep(0.001)
        return state

    def until_failed(self, timeout: float = PATIENCE_S) -> int:
        limit = time.monotonic() + timeout
        while (state := self.nccl.comm_get_async_error(self.comm)) in (Result.SUCCESS, Result.IN_PROGRESS):
            assert time.monotonic() < limit, "it does not fail"
            time.sleep(0.001)
        return state

    def do(self, name: str, *args: Any) -> None:
        """An operation, enqueued and done."""
        self.enqueue(name, *args)
        assert self.stream.synchronize(PATIENCE_S), f"{name} does not end"

    def enqueue(self, name: str, *args: Any) -> int:
        getattr(self.nccl, name)(*args, self.comm, self.stream.handle)
        assert self.settled() == Result.SUCCESS
        return self.stream.record()

    def end(self) -> None:
        self.nccl.comm_finalize(self.comm)
        assert self.settled() == Result.SUCCESS
        self.nccl.comm_destroy(self.comm)
        self.stream.close()


def near(fake_path: str, nccl: Library, world_size: int) -> list[Rank]:
    """All ranks in this process."""
    unique_id = bytes(nccl.get_unique_id())
    made = [Rank(fake_path, unique_id, world_size, rank) for rank in range(world_size)]
    assert [each.settled() for each in made] == [Result.SUCCESS] * world_size
    return made


def ints(*values: int) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(values))(*values)


def at(array: Any, index: int = 0) -> int:
    return ctypes.addressof(array) + index * ctypes.sizeof(array._type_)


def in_child(
    parent: peers.Parent,
    path: str,
    unique_id: bytes,
    world_size: int,
    rank: int,
    what: str,
    env: dict[str, str],
) -> Any:
    os.environ.update(env)  # the fake reads it when it is loaded, which is in here
    me = Rank(path, unique_id, world_size, rank)
    assert me.began == Result.IN_PROGRESS
    if what != "start":
        assert me.settled() == Result.SUCCESS
    return WHAT[what](parent, me)


def all_collectives(parent: peers.Parent, me: Rank) -> dict[str, list[int]]:
    n, r, i32 = me.world_size, me.rank, DataType.INT32
    got: dict[str, list[int]] = {}

    mine, result = ints(r + 1, 10 * (r + 1)), ints(0, 0)
    me.do("all_reduce", at(mine), at(result), 2, i32, RedOp.SUM)
    got["all_reduce"] = list(result)
    me.do("all_reduce", at(mine), at(mine), 2, i32, RedOp.MAX)
    got["all_reduce in place"] = list(mine)

    mine, result = ints(r + 1, -r), ints(7, 7)
    me.do("reduce", at(mine), at(result), 2, i32, RedOp.MIN, n - 1)
    got["reduce"] = list(result)

    gathered = ints(*[0] * (2 * n))
    me.do("all_gather", at(mine), at(gathered), 2, i32)
    got["all_gather"] = list(gathered)
    gathered = ints(*[r] * n)
    me.do("all_gather", at(gathered, r), at(gathered), 1, i32)
    got["all_gather in place"] = list(gathered)

    parts, part = ints(*[100 * r + each for each in range(2 * n)]), ints(0, 0)
    me.do("reduce_scatter", at(parts), at(part), 2, i32, RedOp.SUM)
    got["reduce_scatter"] = list(part)

    mine, result = ints(r, r + 1), ints(-1, -1)
    me.do("broadcast", at(mine), at(result), 2, i32, 0)
    got["broadcast"] = list(result)

    before, after = ints(-1), ints(-1)
    me.nccl.group_start()
    for buffer, step in ((before, -1), (after, 1)):
        me.nccl.send(at(mine), 1, i32, (r + step) % n, me.comm, me.stream.handle)
        me.nccl.recv(at(buffer), 1, i32, (r + step) % n, me.comm, me.stream.handle)
    assert me.nccl.group_end() == Result.IN_PROGRESS
    assert me.settled() == Result.SUCCESS and me.stream.synchronize(PATIENCE_S)
    got["neighbours"] = [before[0], after[0]]

    got["asked"] = [me.nccl.comm_count(me.comm), me.nccl.comm_user_rank(me.comm)]
    me.end()
    got["left"] = [me.controls.get("communicators")]
    return got


def large_both_ways(parent: peers.Parent, me: Rank) -> bool:
    """More than any socket holds, both ways at once."""
    nbytes = 8 << 20
    sent = (ctypes.c_uint8 * nbytes).from_buffer_copy(bytes([me.rank + 1]) * nbytes)
    received = (ctypes.c_uint8 * nbytes)()
    me.nccl.group_start()
    me.nccl.send(at(sent), nbytes, DataType.UINT8, 1 - me.rank, me.comm, me.stream.handle)
    me.nccl.recv(at(received), nbytes, DataType.UINT8, 1 - me.rank, me.comm, me.stream.handle)
    me.nccl.group_end()
    assert me.settled() == Result.SUCCESS and me.stream.synchronize(PATIENCE_S)
    me.end()
    return bytes(received) == bytes([2 - me.rank]) * nbytes


def receive_what_never_comes(parent: peers.Parent, me: Rank) -> list[Any]:
    """Says when it waits, and what became of the communicator; then aborts it."""
    buffer = ints(0)
    event = me.enqueue("recv", at(buffer), 1, DataType.INT32, 1 - me.rank)
    parent.send("waits")
    how = parent.recv()
    state = me.until_failed() if how == "fails" else int(me.nccl.comm_get_async_error(me.comm))
    was_done = me.stream.is_done(event)
    me.nccl.comm_abort(me.comm)
    ended = me.stream.wait(event, PATIENCE_S)
    return [int(state), was_done, ended, me.controls.get("communicators"), me.nccl.get_last_error()]


def wait_to_be_killed(parent: peers.Parent, me: Rank) -> None:
    parent.send("is there")
    parent.recv(PATIENCE_S)


def send_a_lot(parent: peers.Parent, me: Rank) -> None:
    data = (ctypes.c_uint8 * (8 << 20))()
    me.do("send", at(data), len(data), DataType.UINT8, 1 - me.rank)


def receive_a_lot(parent: peers.Parent, me: Rank) -> list[int]:
    data = (ctypes.c_uint8 * (8 << 20))()
    me.nccl.recv(at(data), len(data), DataType.UINT8, 1 - me.rank, me.comm, me.stream.handle)
    event = me.stream.record()
    state = me.until_failed()
    was_done = me.stream.is_done(event)
    me.nccl.comm_abort(me.comm)
    return [int(state), int(was_done), int(me.stream.wait(event, PATIENCE_S))]


def reduce_when_told(parent: peers.Parent, me: Rank) -> list[int]:
    """The state it ends in, whether the operation was done then, and whether it is after the end."""
    data = ints(*[me.rank] * 100_000)
    parent.recv()
    me.nccl.all_reduce(at(data), at(data), len(data), DataType.INT32, RedOp.SUM, me.comm, me.stream.handle)
    event = me.stream.record()
    limit = time.monotonic() + PATIENCE_S
    while not me.stream.is_done(event):
        state = me.nccl.comm_get_async_error(me.comm)
        if state not in (Result.SUCCESS, Result.IN_PROGRESS):
            break
        assert time.monotonic() < limit, "it neither ends nor fails"
        time.sleep(0.001)
    was_done = me.stream.is_done(event)
    state = me.settled()
    me.nccl.comm_abort(me.comm)
    return [int(state), int(was_done), int(me.stream.wait(event, PATIENCE_S))]


def start(parent: peers.Parent, me: Rank) -> list[Any]:
    """How the start ends: waits for it, or aborts when it is told to."""
    parent.send("has begun")
    how = parent.recv()
    state = me.nccl.comm_get_async_error(me.comm) if how == "abort" else me.settled()
    said = me.nccl.get_last_error()
    me.nccl.comm_abort(me.comm)
    return [int(state), said, me.controls.get("communicators")]


WHAT: dict[str, Callable[[peers.Parent, Rank], Any]] = {
    each.__name__: each
    for each in (
        all_collectives,
        large_both_ways,
        receive_what_never_comes,
        wait_to_be_killed,
        send_a_lot,
        receive_a_lot,
        reduce_when_told,
        start,
    )
}
