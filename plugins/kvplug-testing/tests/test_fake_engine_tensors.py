"""FakeEngine: it makes the calls in order, it finds wrong KV, and its schedules can be repeated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from kvplug import Config
from kvplug_testing.contract.connector.schedules import arrivals
from kvplug_testing.engine import CallOrder, FakeEngine, PagedCache, PlannedStep, Schedule, request_of
from kvplug_testing.engine.cache import AXES
from kvplug_testing.engine.fake import roundtrip

_numbers = itertools.count()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    config = Config.from_dict(
        {"connector": "lookup", "role": "both", "host": f"unix:@kvplug-test-fake-engine-{next(_numbers)}"}
    )
    with FakeEngine(config, num_blocks=48) as fake:
        yield fake


BEGINS, ENDS = ["bind_connector_metadata"], ["clear_connector_metadata"]
LAYER = ["has_connector_metadata", "wait_for_layer_load", "save_kv_layer"]
REPORTS = [
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_stats",
    "take_events",
    "build_worker_metadata",
]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (CallOrder(), ["start_load_kv", *3 * LAYER, "wait_for_save", *REPORTS]),
        (
            CallOrder(loads_after_forward=True, drafts=True),
            [*2 * LAYER, "start_load_kv", *REPORTS, *LAYER, "wait_for_save"],
        ),
    ],
)
def test_it_makes_the_calls_in_the_given_order(
    engine: FakeEngine, order: CallOrder, expected: list[str]
) -> None:
    worker, engine.worker = engine.worker, Mock(wraps=engine.worker)
    engine.worker.has_connector_metadata.return_value = True  # else there are no calls for a layer
    prompt, blocks = request_of("a", range(20)), engine.allocate(20)
    engine.scheduler.on_new_request(prompt)
    engine.step([(prompt, blocks, 0, 20)], order=order)
    engine.step([], order=order)
    calls = [call[0] for call in engine.worker.method_calls]
    engine.worker = worker
    beside = [name for name in expected if name not in LAYER]
    assert calls == [*BEGINS, *expected, *ENDS, *BEGINS, *beside, *ENDS]


class Preempting(Schedule):
    """A schedule that compares the blocks of preempted requests, when the worker side gets the news, with
    what was computed into them."""

    num_told = 0

    def __init__(self, fake: FakeEngine, chance: random.Random) -> None:
        super().__init__(fake, chance, depth=4)
        self._computed: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {}
        self._execute_step, fake.execute = fake.execute, self._check  # type: ignore[method-assign]

    def _check(self, planned: PlannedStep, **given: Any) -> Any:
        for name in planned.preempted & self._computed.keys():
            assert self.fake.is_right(*self._computed.pop(name)), (
                f"{name} has lost its KV before the worker side had the news"
            )
            self.num_told += 1
        for request, blocks, computed, new in planned.scheduled:
            self._computed[request.request_id] = request.token_ids, blocks, computed + new
        return self._execute_step(planned, **given)


def test_a_preempted_request_keeps_its_kv_until_the_worker_side_has_the_news(engine: FakeEngine) -> None:
    """With steps in flight that is later than it is planned, and a store may read the blocks until then."""
    chance = random.Random(7)
    engine.free_blocks = engine.free_blocks[:32]
    schedule = Preempting(engine, chance)
    schedule.submit(*arrivals(chance, "r", 40))
    schedule.run()
    assert schedule.num_told


@pytest.mark.parametrize("axes", AXES)
def test_its_cache_detects_wrong_kv_in_every_layout(axes: str) -> None:
    cache = PagedCache(axes=axes, num_blocks=8)
    tokens, blocks = tuple(range(40)), (5, 2, 7)
    for layer in range(3):
        cache.compute(layer, tokens, blocks, 0, 40)
    assert cache.is_right(tokens, blocks, 40)
    assert not cache.is_right((*tokens[:-1], 99), blocks, 40)
    assert not cache.is_right(tokens, (2, 5, 7), 40)
    cache.by_token(1)[2, 3] += 1
    assert cache.wrong_blocks(tokens, blocks, 0, 40) == {2}
    cache.free([1, 3])
    assert not cache.written([1, 3])
    cache.by_token(2)[3, 0] = 0
    assert cache.written([1, 3]) == {3}


@pytest.mark.parametrize("value", [{1}, (1, object()), {"a": frozenset()}, [range(3)]])
def test_only_plain_values_cross(value: Any) -> None:
    with pytest.raises(AssertionError, match="what it returned"):
        roundtrip(value, "what it returned")
    assert roundtrip({"a": (1, [b"x", None])}, "it") == {"a": (1, [b"x", None])}
