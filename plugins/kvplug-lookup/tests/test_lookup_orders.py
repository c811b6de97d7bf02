"""What is not saved beside a load that failed: with shared blocks, and with several workers."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from kvplug import build_connector
from kvplug.engine import CacheGroup, KVCacheConfig, Parallelism, WorkerOutput
from kvplug.metrics.record import RecordedStore
from kvplug.transport import (
    ChainMemo,
    Deadline,
    GetJob,
    Job,
    MissReason,
    PageBuffers,
    PageRows,
    PutReason,
    pack_tokens,
)
from kvplug_lookup.connector.keys import PromptChains, namespace_of
from kvplug_lookup.connector.plan import LoadPlan, SavePlan, StepPlan
from kvplug_testing.engine import MODEL, NUM_LAYERS, CallOrder, FakeEngine, layout_of, request_of
from kvplug_testing.waits import until
from lookup_engines import PAGE, PROMPT, an_address, assert_loads, both, config, num_held, promised, tokens

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """While ``failing.now`` is true, nothing is there that is loaded."""

    class Switch:
        now = False

    get = RecordedStore.submit_get

    def submit_get(store: RecordedStore, pages: Any, **given: Any) -> GetJob:
        if not Switch.now:
            return get(store, pages, **given)
        job = GetJob(len(pages.keys), pages.series.format.num_layers, Deadline.after(None))
        job.set([MissReason.ABSENT] * job.count)
        return job

    monkeypatch.setattr(RecordedStore, "submit_get", submit_get)
    return Switch


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_what_was_computed_beside_a_failed_load_in_shared_blocks_is_not_saved(
    drafts: bool, in_flight: bool, failing: Any
) -> None:
    order = CallOrder(drafts=drafts)
    with both() as engine:
        engine.prefill(request_of("stored", PROMPT))
        prompt, blocks, *_ = promised(engine, request_of("a", tokens(150)), 96)
        # Its engine has a prefix cache: another prompt begins with the blocks that are being loaded.
        sharing = request_of("sharing", [*range(96), *range(7000, 7024)])
        theirs = (*blocks[:6], *engine.allocate(24))
        engine.scheduler.on_new_request(sharing)
        engine.scheduler.update_state_after_alloc(sharing, (theirs,), 0)
        if in_flight:  # the second step is planned before the first one's report is in
            plans = [
                engine.plan([(prompt, blocks, 96, 24)]),
                engine.plan([(prompt, blocks, 120, 30), (sharing, theirs, 96, 24)]),
            ]
        else:
            plans = [engine.plan([(prompt, blocks, 96, 54), (sharing, theirs, 96, 24)])]
        failing.now = True
        reports = [engine.execute(plan, order=order) for plan in plans]
        failing.now = False
        assert reports[0].invalid_block_ids == frozenset(blocks[:6])
        assert num_held(engine) == 6
        for report in reports:
            engine.hear(report)
        assert engine.matched(prompt) == (0, False), "a load of it failed: it is computed"
        # The engine goes back and computes both again, and what is right is saved.
        engine.step([(prompt, blocks, 0, 150), (sharing, theirs, 96, 24)], order=order)
        assert_loads(engine, request_of("b", tokens(150)), 144)
        assert_loads(engine, request_of("c", sharing.token_ids), 112)


def save_of(request_id: str, token_ids: Any) -> SavePlan:
    """All pages of a prompt in one step, from the cache's first blocks."""
    whole = tuple(token_ids)[: len(token_ids) // PAGE * PAGE]
    chains = PromptChains(namespace_of(MODEL), b"", PAGE, ChainMemo())
    return SavePlan(
        request_id=request_id,
        first_page=0,
        parent=chains.root,
        packed_tokens=pack_tokens(whole),
        block_ids=(tuple(range(len(whole) // PAGE)),),
        num_announced=len(whole) // PAGE,
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_is_computed_from_a_load_is_saved_once_every_worker_is_known_to_have_loaded_it(
    num_workers: int,
) -> None:
    """It may have failed at another worker, and all of them compute with each other's parts."""
    layout = layout_of("KBTHD", PAGE, 16)
    names = tuple(f"layers.{index}" for index in range(NUM_LAYERS))
    worker: Any = build_connector(
        config("both", host=an_address("workers")),
        "worker",
        model=MODEL,
        cache=KVCacheConfig(groups=(CacheGroup(layer_names=names, layout=layout),), num_blocks=16),
        parallelism=Parallelism(num_workers=num_workers),
    )
    caches = {name: torch.randn(layout.shape) for name in names}

    def step(number: int, save: SavePlan, *loads: LoadPlan, heard: int) -> tuple[Any, int]:
        """The requests whose saves are given up for now, and how many pages the store has then."""
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
        until(lambda: not worker._saver.bytes_unsaved)
        spoilt = said["spoilt_saves"] if said else None
        return spoilt, worker.first_tier.store.usage().num_pages

    try:
        worker.register_kv_caches(caches)
        stored = save_of("stored", range(96))
        _, held = step(1, stored, heard=0)
        assert held == 6
        load = LoadPlan(
            **{
                name: getattr(stored, name) for name in ("first_page", "parent", "packed_tokens", "block_ids")
            },
            request_id="a",
            start=0,
            end=96,
            sources=((("host", 6),),) * num_workers,
            in_background=False,
        )
        prompt, sharing = save_of("a", range(112)), save_of("b", [*range(96), *range(5000, 5016)])
        if num_workers == 1:
            assert step(2, prompt, load, heard=0)[1] == 7
            return
        assert step(2, prompt, load, heard=0) == (["a"], 6)
        # planned before the second step's reports were in
        assert step(3, sharing, heard=0) == (["b"], 6)
        assert step(4, prompt, heard=2)[1] == 7
        assert step(5, sharing, heard=3)[1] == 8
        spoilt, held = step(6, stored, load, heard=3)
        assert spoilt == [] and held == 8, "nothing is to be saved, and still the step must be heard of"
    finally:
        worker.shutdown()


# -- pages that are not kept -----------------------------------------------------------------------


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """While ``refusing.now`` is true, no page from the third one of a put on is kept."""

    class Switch:
        now = True

    put = RecordedStore.submit_put

    def submit_put(store: RecordedStore, pages: Any, **given: Any) -> Job[PutReason | None]:
        if not Switch.now:
            return put(store, pages, **given)
        taken = slice(0, 2)
        rows = pages.memory.rows()
        memory = PageBuffers(pages.memory.format, PageRows(rows.buffer, rows.offsets[taken], rows.nbytes))
        first = attrs.evolve(pages, keys=pages.keys[taken], identities=pages.identities[taken], memory=memory)
        job: Job[PutReason | None] = Job(len(pages.keys), Deadline.after(None))
        results = put(store, first, **given).wait(10)
        job.set([*results, *[PutReason.NO_ROOM] * (len(pages.keys) - len(results))])
        return job

    monkeypatch.setattr(RecordedStore, "submit_put", submit_put)
    return Switch


@pytest.mark.parametrize("by", ["a later step", "a later request"])
def test_pages_that_a_store_refused_are_saved(
    by: str, refusing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplug_lookup.connector.tracked._MAX_PAUSE_S", 0.0)
    with both() as engine:
        prompt = request_of("a", PROMPT)
        blocks = engine.admit(prompt)
        engine.step([(prompt, blocks, 0, 100)])
        assert num_held(engine) == 2
        refusing.now = False
        if by == "a later request":
            engine.finish(prompt, blocks)
            engine.settle()
            engine.prefill(request_of("again", PROMPT))
        else:
            engine.step([])  # whose report says what was not kept
            engine.step([(prompt, blocks, 99, 1)])
        assert num_held(engine) == 6
        assert_loads(engine, request_of("b", PROMPT), 96)


def test_pages_count_as_saved_once_every_worker_has_kept_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplug_lookup.connector.tracked._MAX_PAUSE_S", 0.0)
    said: dict[str, Any] = {
        key: []
        for key in ("failed_loads", "spoilt_saves", "stalled", "slow", "refused", "unreadable", "settled")
    }

    def hear(rank: int, step: int, unsaved: dict[str, int], read_until: int) -> None:
        part = {**said, "rank": rank, "step": step, "unsaved": unsaved, "read_until": read_until}
        part |= {"rates": None, "reset": False}
        engine.scheduler.update_connector_output(WorkerOutput(worker_metadata=(part,)))

    given = config("both", host=an_address("workers"))
    with FakeEngine(given, parallelism=Parallelism(num_workers=2, tensor_size=2)) as engine:
        a, b, c = (request_of(name, tokens(100, first=1000 * at)) for at, name in enumerate("abc"))
        blocks = {prompt.request_id: engine.admit(prompt) for prompt in (a, b, c)}
        engine.plan([(prompt, blocks[prompt.request_id], 0, 100) for prompt in (a, b, c)])
        hear(0, 1, {}, 1)
        assert engine.finish(b, blocks["b"])[0], "the other worker may still read it"
        hear(1, 1, {"a": 3}, 1)
        assert not engine.finish(c, blocks["c"])[0]
        planned: Any = engine.plan([(a, blocks["a"], 99, 1)]).metadata
        assert [(save["request_id"], save["first_page"]) for save in planned["saves"]] == [("a", 3)]
        assert (planned["ended"], planned["forget"]) == (("b",), ("c",))


def test_a_load_before_the_cache_is_known_is_refused() -> None:
    from kvplug.engine import LayoutError

    with both() as engine:
        engine.prefill(request_of("stored", PROMPT))
        scheduled = promised(engine, request_of("a", PROMPT), 96)
        engine.worker._caches = ()
        with pytest.raises(LayoutError, match="register_kv_caches"):
            engine.step([scheduled])


def test_an_engine_of_a_page_that_a_store_cannot_take_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """One page is larger than all of the store."""
    given = config("producer", options={"host": {"size": 4096, "segment_bytes": 4096}})
    with FakeEngine(given, listen="unix:") as prefill:
        prefill.prefill(request_of("a", PROMPT), chunk=50)
        assert prefill.worker._saver.bytes_unsaved == 0
        num_held(prefill)
        assert set(prefill.figures()["failures"]["save"]) == {"too_large"}
        assert "too_large" in caplog.text
