"""What a request loads and saves after the engine has preempted it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import until
from lookup_engines import PROMPT, both, config, num_held

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["host", "fs"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Keys of a config: a store of the engine's own, and one that all processes reach."""
    return {"stores": [request.param], "options": {"fs": {"path": str(tmp_path)}}}


def preempted(engine: FakeEngine, num_computed: int = 100) -> tuple[Any, tuple[int, ...]]:
    """A request that was preempted after so many tokens, whose pages are in the store."""
    prompt = request_of("a", PROMPT)
    blocks = engine.admit(prompt)
    engine.step([(prompt, blocks, 0, num_computed)])
    assert num_held(engine) == num_computed // 16
    engine.step([], preempted=frozenset({"a"}))
    return prompt, blocks


def saved_pages(engine: FakeEngine, prompt: Any, blocks: tuple[int, ...], *chunks: tuple[int, int]) -> Any:
    """The pages that are planned to be saved by steps that compute these tokens: from and until where."""
    pages = []
    for start, end in chunks:
        planned: Any = engine.plan([(prompt, blocks, start, end - start)])
        engine.hear(engine.execute(planned))
        for save in planned.metadata["saves"]:
            count = len(save["packed_tokens"]) // 4 // 16
            pages.append((save["first_page"], save["first_page"] + count))
    return pages


@pytest.mark.parametrize(
    "chunks", [[(0, 100)], [(0, 40), (40, 100)], [(96, 100)]], ids=["whole", "chunked", "from a prefix cache"]
)
def test_pages_that_were_saved_are_not_saved_again(chunks: Any, stores: dict[str, Any]) -> None:
    with FakeEngine(config("producer", **stores), listen="unix:") as engine:
        prompt, blocks = preempted(engine)
        assert saved_pages(engine, prompt, blocks, *chunks) == []


def test_the_pages_after_those_that_were_saved_are_saved(stores: dict[str, Any]) -> None:
    with FakeEngine(config("producer", **stores), listen="unix:") as engine:
        prompt, blocks = preempted(engine, 50)
        assert saved_pages(engine, prompt, blocks, (0, 40), (40, 100)) == [(3, 6)]
        assert num_held(engine) == 6


def test_a_request_loads_what_it_saved_before_it_was_preempted(stores: dict[str, Any]) -> None:
    with both(**stores) as engine:
        prompt = request_of("a", PROMPT)
        assert engine.matched(prompt) == (0, False)
        engine.scheduler.update_state_after_alloc(prompt, (blocks := engine.allocate(100),), 0)
        engine.step([(prompt, blocks, 0, 100)])
        num_held(engine)
        engine.step([], preempted=frozenset({"a"}))
        assert engine.ask(prompt) == (96, False)


def test_pages_that_the_store_has_lost_are_saved_again(stores: dict[str, Any]) -> None:
    with both(**stores) as engine:
        prompt, blocks = preempted(engine)
        tier = engine.worker.first_tier
        tier.store.submit_remove(tier.store.keys(tier.series)).wait(10)
        until(lambda: engine.ask(prompt) == (0, False), what="that nothing is promised")
        assert saved_pages(engine, prompt, blocks, (0, 100)) == [(0, 6)]
        assert num_held(engine) == 6
