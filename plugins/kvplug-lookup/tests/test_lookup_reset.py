"""A reset of the connector "lookup": no KV computed before it is loaded by a later request.

What the suite of connectors does not see: several workers, and saves on their way.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvplug.transport import Presence
from kvplug.transport.store.store import Store
from kvplug_lookup.connector.plan import StepPlan
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import until
from lookup_engines import (
    PROMPT,
    an_address,
    assert_loads,
    both,
    config,
    failures,
    num_held,
    pair,
    promised,
    two_workers,
    worker_report,
)

pytestmark = pytest.mark.timeout(60)


def test_an_idle_engine_runs_steps_until_its_workers_have_received_the_reset() -> None:
    with FakeEngine(config("producer"), listen="unix:") as prefill:
        assert not prefill.scheduler.has_pending_push_work()
        prefill.scheduler.reset_cache()
        prefill.scheduler.reset_cache()
        assert prefill.scheduler.has_pending_push_work()
        prefill.plan([])
        assert not prefill.scheduler.has_pending_push_work()


@pytest.mark.parametrize("starts_over", [False, True])
def test_a_prompt_that_was_partly_computed_before_a_reset_is_saved_only_if_it_starts_over(
    starts_over: bool,
) -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", PROMPT)
        blocks = prefill.admit(prompt)
        prefill.step([(prompt, blocks, 0, 40)])
        prefill.scheduler.reset_cache()
        prefill.cache.weights = decode.cache.weights = 1
        start = 0 if starts_over else 40
        prefill.step([(prompt, blocks, start, 30)])
        prefill.step([(prompt, blocks, start + 30, 100 - start - 30)])
        assert num_held(prefill) == 6 * starts_over
        assert prefill.worker.saver.bytes_unsaved == 0
        if starts_over:
            assert_loads(decode, request_of("b", PROMPT), 96)


def test_pages_that_are_being_saved_during_a_reset_are_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has them in hand when it is cleared."""
    from kvplug_host.pages.slot_put import SlotPut

    reached, opened = threading.Event(), threading.Event()
    put_some = SlotPut.do

    def wait(*given: Any) -> Any:
        reached.set()
        assert opened.wait(20)
        return put_some(*given)

    monkeypatch.setattr(SlotPut, "do", wait)
    with pair() as (prefill, decode):
        prefill.prefill(request_of("a", PROMPT))
        assert reached.wait(5)
        prefill.scheduler.reset_cache()
        prefill.step([])
        prefill.cache.weights = decode.cache.weights = 1
        opened.set()
        assert num_held(prefill) == 0
        assert decode.matched(request_of("a", PROMPT)) == (0, False)
        prefill.prefill(request_of("again", PROMPT))
        assert_loads(decode, request_of("b", PROMPT), 96)


def test_nothing_is_promised_until_every_worker_has_reported_the_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def presences(chains: list[bytes], first: int, rank: int) -> list[Any]:
        return [] if source.drop.called else [Presence.HELD] * (len(chains) - first)

    source = Mock(replicas=(), is_expecting=False)
    source.name = "host"
    source.inquire.return_value = presences
    monkeypatch.setattr("kvplug_lookup.connector.scheduler.followed", lambda *_, **__: source)
    with two_workers() as engine:
        scheduler = engine.scheduler

        def reset(step: int, *ranks: int) -> None:
            for rank in ranks:
                scheduler.update_connector_output(worker_report(rank, step, reset=True))

        def found(name: str) -> Any:
            return scheduler.get_num_new_matched_tokens(request_of(name, PROMPT), 0)[0]

        assert found("a") == 96
        scheduler.reset_cache()
        engine.plan([])  # step 1
        assert found("a") == found("b") == 0
        reset(1, 0)
        assert found("c") == 0 and not source.drop.called
        scheduler.reset_cache()  # once more, before the first is through
        reset(1, 1)
        assert found("d") == 0
        source.drop.reset_mock()
        engine.plan([])  # step 2
        reset(1, 0, 1)
        assert found("e") == 0 and not source.drop.called
        reset(2, 0, 1)
        source.drop.assert_called_once()
        source.drop.reset_mock()
        assert found("f") == 96


def test_a_load_planned_before_a_reset_finds_nothing_after_it_and_is_computed() -> None:
    with both() as engine:
        engine.prefill(request_of("stored", PROMPT))
        scheduled = promised(engine, request_of("a", PROMPT), 96)
        engine.scheduler.reset_cache()
        engine.cache.weights = 1
        report = engine.step([scheduled])
        assert report.invalid_block_ids == frozenset(scheduled[1][:6])
        assert num_held(engine) == 0
        assert set(failures(engine, "load")) == {"absent"}
        engine.step([(scheduled[0], scheduled[1], 0, 100)])
        assert_loads(engine, request_of("b", PROMPT), 96)


def test_pages_read_before_a_reset_are_not_copied_into_a_store_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Its new keys would promise what was computed before."""
    get = Store.submit_get
    held: list[Any] = []
    stores = {"stores": ["host", "fs"], "options": {"fs": {"path": str(tmp_path)}}}
    with both(**stores) as engine:

        def submit_get(store: Store, pages: Any, **given: Any) -> Any:
            job = get(store, pages, **given)
            job.wait(10)
            engine.worker.bind_connector_metadata(StepPlan(reset=b"salt").to_plain())  # at this moment
            held.append(store)
            return job

        monkeypatch.setattr(Store, "submit_get", submit_get)
        engine.prefill(request_of("a", PROMPT))
        num_held(engine)
        until(lambda: held and not engine.worker.saver.num_behind)
        assert engine.worker.tiers["fs"].store.usage().num_pages == 0


def test_a_consumer_is_reset_once_its_producer_is_reset(caplog: pytest.LogCaptureFixture) -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("a", PROMPT))
        num_held(prefill)
        decode.scheduler.wait_until_ready(10)
        assert decode.scheduler.reset_cache() is False
        assert "reset that engine" in caplog.text
        assert not decode.scheduler.has_pending_push_work()
        assert prefill.scheduler.reset_cache() is True
        prefill.step([])
        until(decode.scheduler.reset_cache, what="the producer's reset at the consumer")
        assert decode.matched(request_of("b", PROMPT)) == (0, False)
        prefill.prefill(request_of("c", PROMPT))
        num_held(prefill)
        until(lambda: not decode.scheduler.reset_cache(), what="the producer's new pages at the consumer")


@pytest.mark.parametrize("has_folder", [False, True], ids=["nothing to forget", "a store that others use"])
def test_a_consumer_without_a_producer_drops_only_its_own_pages(tmp_path: Path, has_folder: bool) -> None:
    given = {"stores": ["fs"], "options": {"fs": {"path": str(tmp_path)}}} if has_folder else {}
    with FakeEngine(config("consumer", **given), connect=an_address("no-engine")) as decode:
        assert decode.scheduler.reset_cache() is not has_folder
