"""Pages: kept once, found with all that was generated, and no more moved than is used."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvplug import ConnectorInfo
from kvplug.transport import Presence
from kvplug_testing.contract.connector.schedules import arrivals, scheduled
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import until
from lookup_engines import (
    PAGE,
    PAGE_BYTES,
    PROMPT,
    assert_loads,
    both,
    chains_of,
    config,
    num_held,
    pair,
    tokens,
)

pytestmark = pytest.mark.timeout(60)


def test_the_pages_of_a_shared_prefix_are_kept_once() -> None:
    prefix, own = [*tokens(30 * PAGE)], 10 * PAGE
    with FakeEngine(config("producer"), listen="unix:", num_blocks=64) as prefill:
        for number in range(100):
            prompt = request_of(f"p{number}", [*prefix, *tokens(own, first=10_000 * (number + 1))])
            blocks = prefill.prefill(prompt)
            prefill.free_blocks.extend(blocks)
        assert num_held(prefill) == 30 + 100 * 10


def test_prompts_and_generated_tokens_are_found_by_the_next_request() -> None:
    with both() as engine:
        prompt = request_of("a", PROMPT)
        blocks = engine.admit(prompt)
        engine.step([(prompt, blocks, 0, 100)])
        said = list(PROMPT)
        for token in tokens(30, first=5000):  # one is computed in each step
            said.append(token)
            grown = attrs.evolve(prompt, token_ids=tuple(said))
            while len(blocks) * PAGE < len(said):
                blocks = (*blocks, *engine.allocate(1))
            engine.step([(grown, blocks, len(said) - 1, 1)])
        engine.finish(grown, blocks)
        engine.settle()
        assert_loads(engine, request_of("turn 2", [*said, *tokens(20, first=9000)]), 128)


def test_tokens_of_drafts_are_never_saved() -> None:
    """A step that computes more tokens than are known computes drafts."""
    with both() as engine:
        prompt = request_of("a", PROMPT)
        blocks = engine.admit(prompt)
        blocks = (*blocks, *engine.allocate(PAGE))
        engine.step([(prompt, blocks, 0, 100)])
        planned = engine.plan([(prompt, blocks, 99, 1 + 2 * PAGE)])
        assert not planned.metadata["saves"]  # type: ignore[index,call-overload]
        engine.scheduler.update_connector_output(engine.execute(planned, compute=False))
        assert num_held(engine) == 6


# -- pages that are coming -----------------------------------------------------------------------


def known(engine: FakeEngine) -> list[Presence | None]:
    """What is known of a prompt's pages in the peer's store."""
    (replica,) = engine.scheduler.replicas
    return replica.presences(chains_of(PROMPT), 0) or []


def test_a_page_that_is_missing_and_planned_is_waited_for_and_then_loaded() -> None:
    with pair(consumer={"lookup": {"wait_timeout_s": 20}}) as (prefill, decode):
        decode.scheduler.wait_until_ready(10)
        prompt = request_of("stored", PROMPT)
        assert decode.matched(request_of("too early", PROMPT)) == (0, False)
        decode.scheduler.get_stats()  # it may have waited for the peer's answer
        blocks = prefill.admit(prompt)
        planned = prefill.plan([(prompt, blocks, 0, 100)])
        prefill.worker.bind_connector_metadata(planned.metadata)  # it is declared now
        asking = request_of("a", PROMPT)
        decode.scheduler.on_new_request(asking)
        until(lambda: Presence.COMING in known(decode), what="the declared pages")
        assert decode.scheduler.get_num_new_matched_tokens(asking, 0)[0] is None
        prefill.worker.start_load_kv()
        for layer in range(3):
            prefill.visit(layer, planned)
        prefill.worker.wait_for_save()
        assert decode.ask(asking) == (96, False)
        ops = decode.scheduler.get_stats()["ops"]
        assert {op: ops[op]["count"] for op in ("match", "wait")} == {"match": 1, "wait": 1}
        assert ops["wait"]["seconds"] > ops["match"]["seconds"]
        (trace_id,) = {ops[op]["samples"][0][1] for op in ("match", "wait")}
        assert len(trace_id) == 32
        prefill.worker.clear_connector_metadata()


def test_a_page_that_does_not_arrive_is_waited_for_until_the_timeout_and_counted() -> None:
    with pair(producer={"lookup": {"wait_timeout_s": 60}}, consumer={"lookup": {"wait_timeout_s": 0.3}}) as (
        prefill,
        decode,
    ):
        decode.scheduler.wait_until_ready(10)
        prompt = request_of("stored", PROMPT)
        planned = prefill.plan([(prompt, prefill.admit(prompt), 0, 100)])
        prefill.worker.bind_connector_metadata(planned.metadata)
        until(lambda: Presence.COMING in known(decode), what="the declared pages")
        asking = request_of("a", PROMPT)
        assert decode.matched(asking) == (0, False)
        stats = decode.scheduler.get_stats()
        assert stats["failures"]["match"] == {"expired": 1} and "match" not in stats["ops"]
        assert stats["ops"]["wait"]["count"] == 1 and stats["ops"]["wait"]["seconds"] >= 0.29
        assert decode.scheduler.get_num_new_matched_tokens(asking, 0)[0] == 0, "it waits no second time"
        prefill.worker.handle_preemptions(frozenset({"stored"}))  # given up: absent from now on
        until(lambda: known(decode) == [], what="the end of the declared pages")
        assert decode.matched(request_of("b", PROMPT)) == (0, False)
        stats = decode.scheduler.get_stats()
        assert stats["failures"]["match"] == {"absent": 1} and not stats["ops"], "a miss, without a wait"
        prefill.worker.clear_connector_metadata()


# -- pages that are not saved --------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_loaded_kv_is_right_whatever_an_engine_does_while_its_blocks_are_read(seed: int) -> None:
    chance = random.Random(seed)
    with both({"max_unsaved": 2 * PAGE_BYTES, "async_load": bool(seed % 2)}) as engine:
        engine.free_blocks = engine.free_blocks[:96]
        coming = arrivals(chance, "r", 16)
        for prefix in ("first", "second"):
            schedule = scheduled(engine, chance)
            schedule.submit(*(attrs.evolve(each, request_id=prefix + each.request_id) for each in coming))
            schedule.run()
        assert schedule.audit.num_loaded


@pytest.mark.parametrize("name", ["host", "fs"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_preempted_request_loads_what_it_saved_or_saves_it_again(
    name: str, lost: bool, tmp_path: Path
) -> None:
    with both(stores=[name], options={"fs": {"path": str(tmp_path)}}) as engine:
        prompt = request_of("a", PROMPT)
        blocks = engine.admit(prompt)
        engine.step([(prompt, blocks, 0, 100)])
        assert num_held(engine) == 6
        engine.hear(engine.execute(engine.plan([], preempted=frozenset({"a"}))))
        tier = engine.worker.first_tier
        if lost:
            tier.store.submit_remove(tier.store.keys(tier.series)).wait(10)
        until(lambda: engine.ask(prompt) == (0 if lost else 96, False))
        planned: Any = engine.plan([(prompt, blocks, 0, 100)])
        assert [save["first_page"] for save in planned.metadata["saves"]] == [0] * lost
        engine.hear(engine.execute(planned))
        assert num_held(engine) == 6


# -- engines that make no call between layers ------------------------------------------------------


def test_calls_in_each_layer_are_only_needed_for_loads_layer_by_layer() -> None:
    assert ConnectorInfo(config("consumer")).needs_layer_hooks
    assert not ConnectorInfo(config("producer")).needs_layer_hooks
    assert not ConnectorInfo(config("consumer", {"async_load": True})).needs_layer_hooks


def test_a_step_without_a_call_in_its_layers_is_saved_and_loaded() -> None:
    """As where an engine replays a captured step."""
    with pair(consumer={"lookup": {"async_load": True}}) as (prefill, decode):
        for engine in (prefill, decode):
            engine.visit = functools.partial(_without_calls, engine)  # type: ignore[method-assign]
        prompt = request_of("a", PROMPT)
        prefill.prefill(prompt, chunk=40)
        assert num_held(prefill) == 6
        blocks, found, _ = decode.load(prompt)
        until(lambda: decode.step([]).finished_recving, what="the end of the load")
        assert found == 96
        assert decode.is_right(prompt.token_ids, blocks, 96)
        assert decode.scheduler.get_hit_sources(prompt, 96) == {"peer": 96}


def _without_calls(engine: FakeEngine, layer: int, planned: Any, *, compute: bool) -> None:
    for request, blocks, computed, new in planned.scheduled:
        engine.cache.compute(layer, request.token_ids, blocks, computed, computed + new)
