"""Ranks of the fake NCCL in one process, for tests of the binding."""

from __future__ import annotations

import time

from kvplug_lab.gpu.fake import Controls, Stream
from kvplug_pynccl.nccl.abi import Result, UniqueId
from kvplug_pynccl.nccl.library import Library

PATIENCE_S = 60.0


class Rank:
    """A non-blocking communicator, its stream, and waits with a deadline."""

    def __init__(self, nccl: Library, unique_id: UniqueId, world_size: int = 1, rank: int = 0) -> None:
        self.nccl = nccl
        self.stream: Stream = Controls(nccl.path).stream()
        self.comm, self.began = nccl.comm_init_rank_config(
            world_size, unique_id, rank, nccl.config(blocking=0)
        )

    def settled(self, timeout: float = PATIENCE_S) -> int:
        """The communicator's state once it is in progress no more."""
        limit = time.monotonic() + timeout
        while (state := self.nccl.comm_get_async_error(self.comm)) == Result.IN_PROGRESS:
            assert time.monotonic() < limit, "it is still in progress"
            time.sleep(0.001)
        return state

    def end(self) -> None:
        self.nccl.comm_abort(self.comm)
        self.stream.close()


def near(nccl: Library, world_size: int = 1) -> list[Rank]:
    unique_id = nccl.get_unique_id()
    made = [Rank(nccl, unique_id, world_size, rank) for rank in range(world_size)]
    assert [each.settled() for each in made] == [Result.SUCCESS] * world_size
    return made
