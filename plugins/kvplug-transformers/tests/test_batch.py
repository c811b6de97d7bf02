"""Where the tokens of a forward pass go."""

from __future__ import annotations

from kvplug.engine import ScheduledRequest, SchedulerOutput
from kvplug_transformers.engine.batch import Batch
from kvplug_transformers.engine.step import Step


def step(*requests):
    """Of (tokens computed before, tokens to compute, blocks) for each request."""
    return Step(
        output=SchedulerOutput(
            step=1,
            scheduled=tuple(
                ScheduledRequest(request_id=str(n), num_computed_tokens=computed, num_scheduled_tokens=new)
                for n, (computed, new, _) in enumerate(requests)
            ),
            block_ids={}.__getitem__,
        ),
        token_ids=tuple((0,) * new for _, new, _ in requests),
        block_tables=tuple(blocks for *_, blocks in requests),
        samples=(True,) * len(requests),
        metadata=None,
    )


def test_each_token_has_its_place_in_its_own_requests_blocks():
    batch = Batch.of(step((0, 3, (5,)), (3, 2, (9, 2))), block_size=4)
    assert batch.query_lens == (3, 2)
    assert batch.seq_lens == (3, 5)
    assert batch.block_tables == ((5,), (9, 2))
    assert batch.positions == (0, 1, 2, 3, 4)
    assert batch.slot_mapping == (20, 21, 22, 39, 8)


def test_a_step_without_requests_has_no_tokens():
    batch = Batch.of(step(), block_size=4)
    assert (batch.positions, batch.slot_mapping, batch.block_tables) == ((), (), ())
