"""What is saved, and when: beside loads, with several workers, and after a store has refused it."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.net.wire.token_ids import pack_tokens
from kvplug.transport import Deadline, Job, PutReason
from kvplug.transport.store.store import Store
from kvplug_lookup.connector.plan import LoadPlan, SavePlan, StepPlan
from kvplug_testing.engine import PlannedStep, request_of
from lookup_engines import (
    PAGE,
    PROMPT,
    assert_loads,
    both,
    num_held,
    tokens,
    two_workers,
    worker_report,
)

pytestmark = pytest.mark.timeout(60)


def save_of(request_id: str, token_ids: Any) -> SavePlan:
    """All pages of a prompt in one step, from the cache's first blocks."""
    whole = tuple(token_ids)[: len(token_ids) // PAGE * PAGE]
    return SavePlan(
        request_id=request_id,
        first_page=0,
        parent=bytes(32),
        packed_tokens=pack_tokens(whole),
        block_ids=(tuple(range(len(whole) // PAGE)),),
        num_announced=len(whole) // PAGE,
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_pages_computed_from_a_load_are_saved_once_every_worker_has_reported_the_load(
    num_workers: int,
) -> None:
    """It may have failed at another worker, and all of them compute with each other's parts."""
    with both() if num_workers == 1 else two_workers() as engine:

        def step(number: int, save: SavePlan, *loads: LoadPlan, last_report: int) -> tuple[Any, int]:
            """The requests whose saves are given up for now, and how many pages the store has then."""
            plan = StepPlan(step=number, last_report=last_report, loads=loads, saves=(save,)).to_plain()
            scheduled = ((request_of("any", range(1)), (0,), 0, 1),)
            planned = PlannedStep(scheduled=scheduled, preempted=frozenset(), metadata=plan)
            report = engine.execute(planned, compute=False)
            assert not report.invalid_block_ids
            spoilt: Any = next((part["spoilt_saves"] for part in report.worker_metadata), None)  # type: ignore[attr-defined]
            return spoilt, num_held(engine)

        stored = save_of("stored", range(96))
        assert step(1, stored, last_report=0)[1] == 6
        pages = {
            name: getattr(stored, name) for name in ("first_page", "parent", "packed_tokens", "block_ids")
        }
        sources = ((("host", 6),),) * num_workers
        load = LoadPlan(**pages, request_id="a", start=0, end=96, sources=sources, in_background=False)
        prompt, sharing = save_of("a", range(112)), save_of("b", [*range(96), *range(5000, 5016)])
        if num_workers == 1:
            assert step(2, prompt, load, last_report=0)[1] == 7
            return
        assert step(2, prompt, load, last_report=0) == (["a"], 6)
        # planned before the second step's reports were in
        assert step(3, sharing, last_report=0) == (["b"], 6)
        assert step(4, prompt, last_report=2)[1] == 7
        assert step(5, sharing, last_report=3)[1] == 8
        spoilt, held = step(6, stored, load, last_report=3)
        assert spoilt == [] and held == 8, "nothing is to be saved, and still the step must be heard of"


# -- pages that are not kept -----------------------------------------------------------------------


def test_pages_that_a_store_refused_are_saved_by_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplug_lookup.connector.tracked._MAX_PAUSE_S", 0.0)

    def refuse(store: Store, pages: Any, **given: Any) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), Deadline.after(None))
        job.set([PutReason.NO_ROOM] * job.count)
        return job

    with both() as engine:
        prompt = request_of("a", PROMPT)
        blocks = engine.admit(prompt)
        with monkeypatch.context() as refusing:
            refusing.setattr(Store, "submit_put", refuse)
            engine.step([(prompt, blocks, 0, 100)])
            assert num_held(engine) == 0
        engine.step([])  # its report names the pages that were not saved
        engine.step([(prompt, blocks, 99, 1)])
        assert num_held(engine) == 6
        assert_loads(engine, request_of("b", PROMPT), 96)


def test_pages_count_as_saved_once_every_worker_has_kept_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplug_lookup.connector.tracked._MAX_PAUSE_S", 0.0)
    with two_workers() as engine:
        a, b, c = (request_of(name, tokens(100, first=1000 * at)) for at, name in enumerate("abc"))
        blocks = {prompt.request_id: engine.admit(prompt) for prompt in (a, b, c)}
        engine.plan([(prompt, blocks[prompt.request_id], 0, 100) for prompt in (a, b, c)])
        engine.scheduler.update_connector_output(worker_report(0, 1, read_until=1))
        assert engine.finish(b, blocks["b"])[0], "the other worker may still read it"
        engine.scheduler.update_connector_output(worker_report(1, 1, unsaved={"a": 3}, read_until=1))
        assert not engine.finish(c, blocks["c"])[0]
        planned: Any = engine.plan([(a, blocks["a"], 99, 1)]).metadata
        assert [(save["request_id"], save["first_page"]) for save in planned["saves"]] == [("a", 3)]
        assert (planned["ended"], planned["forget"]) == (("b",), ("c",))
