"""The connector "lookup" in engines that call in other orders, or have several steps in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvplug import Config, IntegrityError, build_connector
from kvplug.engine import CacheGroup, KVCacheConfig, Parallelism, Request
from kvplug_lookup.connector.load import Load
from kvplug_lookup.connector.plan import LoadPlan, SavePlan, StepPlan
from kvplug_testing.engine import (
    MODEL,
    NUM_LAYERS,
    CallOrder,
    FakeEngine,
    layout_of,
    request_of,
)

pytestmark = pytest.mark.timeout(60)

BASE: dict[str, Any] = {"connector": "lookup", "connect_timeout_s": 20, "timeout_s": 10}
ASYNC = {"options": {"lookup": {"async_load": True}}}
BLOCK = 16

needing_loads = pytest.mark.parametrize(
    "order", [CallOrder(), CallOrder(drafts=True)], ids=["usual", "drafting"]
)


def config(role: str, **more: Any) -> Config:
    return Config.from_dict({**BASE, "role": role, **more})


@contextlib.contextmanager
def pair(**consumer: Any) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    with (
        FakeEngine(config("producer"), listen="unix:", seed=1) as prefill,
        FakeEngine(config("consumer", **consumer), connect=prefill.worker.contact, seed=2) as decode,
    ):
        yield prefill, decode


@contextlib.contextmanager
def both(name: str, **more: Any) -> Iterator[FakeEngine]:
    """An engine that saves for itself and loads what it saved."""
    with FakeEngine(config("both", host=f"unix:@kvplug-test-{name}", **more)) as engine:
        yield engine


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """While ``failing.now`` is true, every load that begins is refused."""

    class Switch:
        now = False

    begin = Load.begin

    def refuse(self: Load, header: Any) -> None:
        if Switch.now:
            raise IntegrityError("refused by the test")
        begin(self, header)

    monkeypatch.setattr(Load, "begin", refuse)
    return Switch


def admit(engine: FakeEngine, prompt: Request, expected: int) -> tuple[int, ...]:
    """A request comes in and is promised so many tokens. Returns its blocks."""
    found, _ = engine.matched(prompt)
    assert found == expected
    blocks = engine.allocate(len(prompt.token_ids))
    engine.scheduler.update_state_after_alloc(prompt, (blocks,), found)
    return blocks


def assert_loads(engine: FakeEngine, name: str, token_ids: tuple[int, ...]) -> None:
    """What the engine saved of these tokens is promised, and right."""
    whole = (len(token_ids) - 1) // BLOCK * BLOCK
    prompt = request_of(name, token_ids)
    blocks, loaded, report = engine.load(prompt)
    assert loaded == whole
    assert not report.invalid_block_ids
    assert engine.is_right(token_ids, blocks, whole)


# -- other orders --------------------------------------------------------------------------------


@needing_loads
def test_a_load_that_fails_is_in_its_steps_report_and_nothing_of_it_is_saved_in_either_order(
    order: CallOrder, failing: Any
) -> None:
    with both(f"failing-{order.drafts}") as engine:
        engine.prefill(request_of("stored", range(100)))
        prompt = request_of("a", range(150))
        blocks = admit(engine, prompt, 96)
        failing.now = True
        report = engine.step([(prompt, blocks, 96, 54)], order=order)
        failing.now = False
        assert report.invalid_block_ids == frozenset(blocks[:6])
        assert engine.matched(prompt) == (0, False)  # the scheduler side has heard of it in the same step
        engine.worker._saver.settle()
        assert len(engine.worker._store) == 1
        engine.step([(prompt, blocks, 0, 150)], order=order)
        assert_loads(engine, "again", prompt.token_ids)


# -- several steps in flight ---------------------------------------------------------------------


@needing_loads
def test_a_step_that_was_planned_before_a_load_failed_stores_nothing_wrong(
    order: CallOrder, failing: Any
) -> None:
    with both(f"in-flight-{order.drafts}") as engine:
        engine.prefill(request_of("stored", range(100)))
        prompt = request_of("a", range(150))
        blocks = admit(engine, prompt, 96)
        # Its engine has a prefix cache: another prompt begins with the blocks that are being loaded.
        sharing = request_of("sharing", [*range(96), *range(7000, 7024)])
        theirs = (*blocks[:6], *engine.allocate(24))
        engine.scheduler.on_new_request(sharing)
        engine.scheduler.update_state_after_alloc(sharing, (theirs,), 0)
        first = engine.plan([(prompt, blocks, 96, 24)])
        second = engine.plan([(prompt, blocks, 120, 30), (sharing, theirs, 96, 24)])
        failing.now = True
        reports = [engine.execute(first, order=order), engine.execute(second, order=order)]
        failing.now = False
        assert [report.invalid_block_ids for report in reports] == [frozenset(blocks[:6]), frozenset()]
        engine.worker._saver.settle()
        assert len(engine.worker._store) == 1
        for report in reports:
            engine.scheduler.update_connector_output(report)
        # The engine goes back and computes both again, and what is right is saved.
        engine.step([(prompt, blocks, 0, 150), (sharing, theirs, 96, 24)], order=order)
        assert_loads(engine, "b", prompt.token_ids)
        assert_loads(engine, "c", sharing.token_ids)


def test_a_prompt_computed_again_while_older_reports_are_on_their_way_is_stored_right(failing: Any) -> None:
    with both("older-reports") as engine:
        engine.prefill(request_of("stored", range(100)))
        prompt = request_of("a", range(150))
        blocks = admit(engine, prompt, 96)
        first = engine.plan([(prompt, blocks, 96, 24)])
        second = engine.plan([(prompt, blocks, 120, 30)])
        failing.now = True
        report = engine.execute(first)
        failing.now = False
        engine.scheduler.update_connector_output(report)
        third = engine.plan([(prompt, blocks, 0, 70)])  # the first of two chunks, the second step is not back
        report = engine.execute(second)
        fourth = engine.plan([(prompt, blocks, 70, 80)])
        engine.scheduler.update_connector_output(report)
        for planned in (third, fourth):
            engine.scheduler.update_connector_output(engine.execute(planned))
        assert_loads(engine, "b", prompt.token_ids)


# -- several workers -----------------------------------------------------------------------------


def save_of(request_id: str, token_ids: Any) -> SavePlan:
    """All of a prompt in one step, from the cache's first blocks."""
    tokens = tuple(token_ids)
    return SavePlan(
        request_id=request_id,
        token_ids=tokens,
        extra=b"",
        block_ids=tuple(range(-(-len(tokens) // BLOCK))),
        start=0,
        end=len(tokens),
        is_last=True,
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_is_computed_from_a_load_is_saved_once_every_worker_is_known_to_have_loaded_it(
    num_workers: int,
) -> None:
    """It may have failed at another worker, and all of them compute with each other's parts."""
    layout = layout_of("KBTHD", BLOCK, 16)
    names = tuple(f"layers.{index}" for index in range(NUM_LAYERS))
    worker: Any = build_connector(
        config("both", host="unix:@kvplug-test-workers"),
        "worker",
        model=MODEL,
        cache=KVCacheConfig(groups=(CacheGroup(layer_names=names, layout=layout),), num_blocks=16),
        parallelism=Parallelism(num_workers=num_workers),
    )
    caches = {name: torch.randn(layout.shape) for name in names}

    def step(number: int, save: SavePlan, *loads: LoadPlan, heard: int) -> tuple[Any, int]:
        """What the worker says after the step, and how many prompts it then holds."""
        plan = StepPlan(step=number, heard=heard, loads=loads, saves=(save,))
        worker.bind_connector_metadata(plan.to_plain())
        worker.start_load_kv()
        for name in names:
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, caches[name])
        worker.wait_for_save()
        worker.get_finished(frozenset())
        assert not worker.get_block_ids_with_load_errors()
        said = worker.build_worker_metadata()
        worker.clear_connector_metadata()
        worker._saver.settle()
        return said, len(worker._store)

    try:
        worker.register_kv_caches(caches)
        stored = save_of("stored", range(96))
        assert step(1, stored, heard=0) == (None, 1)
        load = LoadPlan(
            request_id="a",
            token_ids=tuple(range(96)),
            extra=b"",
            block_ids=tuple(range(6)),
            start=0,
            in_background=False,
        )
        prompt, sharing = save_of("a", range(112)), save_of("b", [*range(96), *range(5000, 5016)])
        if num_workers == 1:
            assert step(2, prompt, load, heard=0) == (None, 2)
            return
        said, held = step(2, prompt, load, heard=0)
        assert (said["step"], said["failed_loads"], said["spoilt_saves"], held) == (2, [], ["a"], 1)
        said, held = step(3, sharing, heard=0)  # planned before the second step's reports were in
        assert (said["step"], said["failed_loads"], said["spoilt_saves"], held) == (3, [], ["b"], 1)
        assert step(4, prompt, heard=2) == (None, 2)
        assert step(5, sharing, heard=3) == (None, 3)
        said, held = step(6, stored, load, heard=3)  # nothing to save, and still the step must be heard of
        assert (said["step"], said["spoilt_saves"], held) == (6, [], 3)
    finally:
        worker.shutdown()
