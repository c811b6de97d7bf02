"""Queues that the ranks of a group make, from one rank to all others."""

from __future__ import annotations

from typing import Any, Final

import pytest

from kvplug import KvplugError, StatelessGroup, TransportError
from kvplug.transport import MessageQueue
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import CHUNKS, QueueSuite, received, sent, wrong
from kvplug_testing.waits import Call

WORLD: Final = 3
REFUSAL: Final = "no room for another reader"


class Groups(QueueSuite):
    """A queue over a group is made at all of its ranks, or at none."""

    @law("QUEUE-1")
    @pytest.mark.parametrize("writer_rank", [0, 2])
    def test_a_queue_over_a_group_goes_from_one_rank_to_all_others(self, writer_rank: int) -> None:
        calls = [self._making(group, writer_rank) for group in self._groups()]
        ends: list[MessageQueue] = [call.result(waits.patience_s + 5) for call in calls]
        for end in ends:
            self.later(end.abort)
        wanted = [None if rank == writer_rank else rank for rank in range(WORLD)]
        assert [end.rank for end in ends] == wanted, "not every rank has the end of its own rank"
        values = [{"number": number} for number in range(CHUNKS)]
        for value in values:
            sent(ends[writer_rank], value)
        for end in ends:
            if not end.is_writer:
                assert not wrong([received(end) for _ in values], values)

    @law("ALL-5", "ALL-7")
    def test_over_a_group_all_ranks_are_told_of_a_reader_that_cannot_attach(self) -> None:
        asked: list[int] = []

        def refuse(handle: Any, rank: int, timeout: Any = None) -> Any:
            asked.append(rank)
            raise TransportError(REFUSAL)

        groups = self._groups()
        calls = [self._making(group, 0, refuse if group.rank == 1 else None) for group in groups]
        calls[1].end(waits.patience_s + 5)
        if not asked:
            for call in calls:
                call.result(waits.patience_s + 5).abort()
            pytest.skip(f"{self.called} makes a queue over a group without create_from_handle")
        for rank, call in enumerate(calls):
            error = call.raised(TransportError, waits.patience_s + 5)
            assert "rank 1" in str(error) and REFUSAL in str(error), (
                f"what rank {rank} raises does not name rank 1 and its reason: {error}"
            )

    @law("ALL-4", "ALL-7")
    @pytest.mark.parametrize("writer_rank", [0, 2])
    def test_over_a_group_a_rank_that_leaves_is_not_waited_for_without_end(self, writer_rank: int) -> None:
        groups = self._groups()
        groups[2].close(waits.patience_s)
        for call in [self._making(group, writer_rank, timeout=1.0) for group in groups[:2]]:
            call.raised(KvplugError)

    def _groups(self) -> list[StatelessGroup]:
        """The group objects of all ranks, in this process."""
        listener = StatelessGroup.listen("unix:")

        def make(rank: int) -> StatelessGroup:
            address = listener.contact if rank else listener
            within = waits.patience_s
            return StatelessGroup.create(
                address, rank=rank, world_size=WORLD, timeout=within, timeout_s=within
            )

        calls = [Call(lambda rank=rank: make(rank)) for rank in range(WORLD)]  # type: ignore[misc]
        groups = [call.result(waits.patience_s + 5) for call in calls]
        for group in groups:
            self.later(group.abort)
        return groups

    def _making(
        self, group: StatelessGroup, writer_rank: int, attach: Any = None, timeout: float | None = None
    ) -> Call:
        """One rank's call. ``attach`` replaces its endpoint's ``create_from_handle``."""
        end = self.endpoint(n_reader=WORLD - 1)
        if attach is not None:
            end.create_from_handle = attach  # type: ignore[method-assign]
        within = waits.patience_s if timeout is None else timeout
        return Call(lambda: end.create_from_process_group(group, writer_rank, within))
