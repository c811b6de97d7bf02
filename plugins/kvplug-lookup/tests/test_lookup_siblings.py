"""Another connector of the engine loads a prefix, and that fails: what is right is saved, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvplug.engine import Request
from kvplug_testing.engine import FakeEngine, PlannedStep, request_of
from lookup_engines import PROMPT, both, num_held

pytestmark = pytest.mark.timeout(60)

LOADED = 96
"""Tokens of the prompt that the other connector loads: its first six pages."""
MORE = range(150)
"""The prompt, and what comes after it."""


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with both() as engine:
        yield engine


def begun(
    engine: FakeEngine, name: str, token_ids: Any = MORE, shared: tuple[int, ...] = ()
) -> tuple[Request, tuple[int, ...]]:
    """A request for which this connector loads nothing, and its blocks, the first ones of another request."""
    prompt = request_of(name, token_ids)
    assert engine.matched(prompt, len(shared) * engine.block_size) == (0, False)
    blocks = shared + engine.allocate(len(prompt.token_ids) - len(shared) * engine.block_size)
    engine.scheduler.update_state_after_alloc(prompt, ((),), 0)  # a MultiConnector gives its blocks to one
    return prompt, blocks


def run(engine: FakeEngine, planned: PlannedStep, invalid: tuple[int, ...] = ()) -> None:
    """Run the step, whose report also names blocks of the other connector."""
    report = engine.execute(planned)
    engine.hear(attrs.evolve(report, invalid_block_ids=report.invalid_block_ids | set(invalid)))


def assert_saved(engine: FakeEngine, num_pages: int, *prompts: Any) -> None:
    """So many pages are held, and whatever is loaded of these prompts is right."""
    assert num_held(engine) == num_pages
    for number, token_ids in enumerate(prompts):
        again = request_of(f"again {number}", token_ids)
        blocks, found, report = engine.load(again)
        assert report.invalid_block_ids == frozenset()
        assert engine.is_right(again.token_ids, blocks, found), f"wrong KV of {token_ids} was saved"
        engine.finish(again, blocks)


def test_loaded_pages_are_saved_in_the_next_step(engine: FakeEngine) -> None:
    prompt, blocks = begun(engine, "a")
    engine.compute(prompt.token_ids, blocks, 0, LOADED)
    run(engine, engine.plan([(prompt, blocks, LOADED, 32)]))
    assert_saved(engine, 0)
    engine.step([(prompt, blocks, LOADED + 32, 1)])
    assert_saved(engine, 8, MORE)


def test_pages_that_the_load_missed_are_computed_and_the_rest_is_saved(engine: FakeEngine) -> None:
    prompt, blocks = begun(engine, "a")
    engine.compute(prompt.token_ids, blocks, 0, 48)
    run(engine, engine.plan([(prompt, blocks, LOADED, 54)]), invalid=blocks[3:6])
    engine.step([(prompt, blocks, 48, 40)])
    assert_saved(engine, 5, MORE)


def test_a_request_saves_nothing_that_another_one_has_still_to_compute(engine: FakeEngine) -> None:
    """Of requests that share blocks vLLM lets one compute them, and counts them as right for the others."""
    prompt, blocks = begun(engine, "a")
    other, theirs = begun(engine, "b", [*PROMPT[:LOADED], *range(700, 764)], blocks[:6])
    run(engine, engine.plan([(prompt, blocks, LOADED, 54), (other, theirs, LOADED, 32)]), invalid=blocks[:6])
    engine.step([(prompt, blocks, 0, 40), (other, theirs, LOADED, 32)])
    engine.step([(prompt, blocks, 40, 110), (other, theirs, LOADED + 32, 32)])
    engine.step([(other, theirs, LOADED + 63, 1)])
    assert_saved(engine, 9, MORE, other.token_ids)
