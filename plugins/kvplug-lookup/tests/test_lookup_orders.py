"""The connector "lookup" in engines that call in other orders, or have several steps in flight."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

from kvplug import (
    CacheGroup,
    Config,
    IntegrityError,
    KVCacheConfig,
    Parallelism,
    Request,
    RequestEnd,
    WorkerOutput,
    build_connector,
)
from kvplug.testing.engine import (
    MODEL,
    NUM_LAYERS,
    CallOrder,
    EngineDouble,
    PlannedStep,
    layout_of,
    request_of,
)
from kvplug_lookup.connector.load import Load
from kvplug_lookup.connector.plan import LoadPlan, SavePlan, StepPlan

pytestmark = pytest.mark.timeout(60)

BASE: dict[str, Any] = {"connector": "lookup", "connect_timeout_s": 20, "timeout_s": 10}
ASYNC = {"options": {"lookup": {"async_load": True}}}
BLOCK = 16

USUAL, DRAFTING = CallOrder(), CallOrder(drafts=True)
LATE = CallOrder(loads_after_forward=True)
LATE_AND_DRAFTING = CallOrder(loads_after_forward=True, drafts=True)
any_order = pytest.mark.parametrize(
    "order",
    [USUAL, LATE, DRAFTING, LATE_AND_DRAFTING],
    ids=["usual", "loads-late", "drafting", "loads-late-and-drafting"],
)
"""For steps that need no load of their own."""
needing_loads = pytest.mark.parametrize("order", [USUAL, DRAFTING], ids=["usual", "drafting"])


def config(role: str, **more: Any) -> Config:
    return Config.from_dict({**BASE, "role": role, **more})


@contextlib.contextmanager
def pair(**consumer: Any) -> Iterator[tuple[EngineDouble, EngineDouble]]:
    with (
        EngineDouble(config("producer"), listen="unix:", seed=1) as prefill,
        EngineDouble(config("consumer", **consumer), connect=prefill.worker.contact, seed=2) as decode,
    ):
        yield prefill, decode


@contextlib.contextmanager
def both(name: str, **more: Any) -> Iterator[EngineDouble]:
    """An engine that saves for itself and loads what it saved."""
    with EngineDouble(config("both", host=f"unix:@kvplug-test-{name}", **more)) as engine:
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


def admit(engine: EngineDouble, prompt: Request, expected: int) -> tuple[int, ...]:
    """A request comes in and is promised so many tokens. Returns its blocks."""
    found, _ = engine.matched(prompt)
    assert found == expected
    blocks = engine.allocate(len(prompt.token_ids))
    engine.scheduler.update_state_after_alloc(prompt, (blocks,), found)
    return blocks


def assert_loads(engine: EngineDouble, name: str, token_ids: tuple[int, ...]) -> None:
    """What the engine saved of these tokens is promised, and right."""
    whole = (len(token_ids) - 1) // BLOCK * BLOCK
    prompt = request_of(name, token_ids)
    blocks, loaded, report = engine.load(prompt)
    assert loaded == whole
    assert not report.invalid_block_ids
    assert engine.is_right(token_ids, blocks, whole)


class Noting:
    """Writes down the calls that an engine makes to one side of its connector."""

    def __init__(self, side: Any, calls: list[str]) -> None:
        self._side, self._calls = side, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._side, name)

        def noting(*args: Any) -> Any:
            self._calls.append(name)
            return found(*args)

        return noting


BEGINS = ["bind_connector_metadata"]
LAYER = ["wait_for_layer_load", "save_kv_layer"]
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
        (USUAL, ["start_load_kv", *3 * LAYER, "wait_for_save", *REPORTS]),
        (LATE, [*3 * LAYER, "start_load_kv", "wait_for_save", *REPORTS]),
        (DRAFTING, ["start_load_kv", *2 * LAYER, *REPORTS, *LAYER, "wait_for_save"]),
        (LATE_AND_DRAFTING, [*2 * LAYER, "start_load_kv", *REPORTS, *LAYER, "wait_for_save"]),
    ],
)
def test_the_double_calls_in_the_order_it_is_told(order: CallOrder, expected: list[str]) -> None:
    calls: list[str] = []
    with EngineDouble(config("producer"), listen="unix:") as prefill:
        worker = prefill.worker
        prefill.worker = Noting(worker, calls)
        prefill.prefill(request_of("a", range(20)), order=order)
        prefill.step([], order=order)
        prefill.worker = worker
    layers = set(LAYER)
    beside = [name for name in expected if name not in layers]
    ends = ["clear_connector_metadata"]
    assert calls == [*BEGINS, *expected, *ends, *BEGINS, *beside, *ends]


def test_block_tables_are_valid_while_a_step_is_planned_and_no_longer() -> None:
    outputs: list[Any] = []
    with EngineDouble(config("producer"), listen="unix:") as prefill:
        build = prefill.scheduler.build_connector_meta
        prefill.scheduler.build_connector_meta = lambda output: (outputs.append(output), build(output))[1]
        prefill.prefill(request_of("a", range(20)))
        with pytest.raises(KeyError):
            outputs[0].block_ids("a")


# -- other orders --------------------------------------------------------------------------------


@any_order
@pytest.mark.parametrize("chunk", [None, 37])
def test_a_prompt_is_saved_whole_in_whatever_order_its_engine_calls(
    order: CallOrder, chunk: int | None
) -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", range(100))
        prefill.prefill(prompt, chunk=chunk, order=order)
        blocks, loaded, report = decode.load(prompt)
        assert (loaded, report.invalid_block_ids) == (96, frozenset())
        assert decode.is_right(prompt.token_ids, blocks, 100)


@any_order
def test_a_background_load_arrives_in_whatever_order_its_engine_calls(order: CallOrder) -> None:
    with pair(**ASYNC) as (prefill, decode):
        prompt = request_of("a", range(100))
        prefill.prefill(prompt)
        blocks = admit(decode, prompt, 96)
        other = request_of("other", range(5000, 5040))
        theirs = decode.allocate(40)
        decode.scheduler.on_new_request(other)
        named: list[str] = []
        while not named:  # beside a request that computes, so that there is a forward pass
            named += decode.step([(other, theirs, 0, 40)], order=order).finished_recving
        for _ in range(3):
            named += decode.step([], order=order).finished_recving
        assert named == ["a"]
        assert decode.is_right(prompt.token_ids, blocks, 96)


@needing_loads
def test_a_load_that_its_step_needs_is_there_in_either_order(order: CallOrder) -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", range(100))
        prefill.prefill(prompt)
        blocks, loaded, report = decode.load(prompt, order=order)
        assert (loaded, report.invalid_block_ids) == (96, frozenset())
        assert decode.is_right(prompt.token_ids, blocks, 100)


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


@pytest.mark.parametrize("first", ["wait_for_save", "get_finished", "get_block_ids_with_load_errors"])
def test_whichever_call_comes_first_after_the_forward_pass_waits_for_the_steps_loads(
    first: str, failing: Any
) -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", range(100))
        prefill.prefill(prompt)
        blocks = admit(decode, prompt, 96)
        failing.now = True
        planned = decode.plan([(prompt, blocks, 96, 4)])
        worker = decode.worker
        worker.bind_connector_metadata(planned.metadata)
        worker.start_load_kv()
        found = getattr(worker, first)(*[frozenset()] if first == "get_finished" else [])
        assert not worker._loads
        if first == "get_block_ids_with_load_errors":
            assert found == frozenset(blocks[:6])
        else:
            assert worker.get_block_ids_with_load_errors() == frozenset(blocks[:6])
        assert worker.build_worker_metadata()["failed_loads"] == ["a"]


@any_order
def test_a_request_that_is_aborted_while_it_loads_is_named_once_and_as_received(
    order: CallOrder, failing: Any
) -> None:
    with pair(**ASYNC) as (prefill, decode):
        prompt = request_of("a", range(100))
        prefill.prefill(prompt)
        blocks = admit(decode, prompt, 96)
        reports = [decode.execute(decode.plan([]), order=order)]
        # The engine has not told what the worker side reported: to the scheduler side it is loading.
        keeps, _ = decode.scheduler.request_finished(prompt, (blocks,), RequestEnd.ABORTED)
        assert keeps
        decode.scheduler.update_connector_output(reports[0])
        while not any(report.finished_recving for report in reports):
            reports.append(decode.step([], order=order))
        reports += [decode.step([], order=order) for _ in range(3)]
        assert [name for report in reports for name in report.finished_recving] == ["a"]
        assert not any(report.finished_sending for report in reports)


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


def test_a_request_that_ends_before_its_load_is_reported_gives_its_blocks_back_once() -> None:
    with pair(**ASYNC) as (prefill, decode):
        prompt = request_of("a", range(100))
        prefill.prefill(prompt)
        blocks = admit(decode, prompt, 96)
        reports = [decode.execute(decode.plan([]))]
        while not reports[-1].finished_recving:
            reports.append(decode.execute(decode.plan([])))
        keeps, _ = decode.scheduler.request_finished(prompt, (blocks,), RequestEnd.ABORTED)
        assert keeps  # the report that frees them is under way
        for report in reports:
            decode.scheduler.update_connector_output(report)
        assert not any(decode.step([]).finished_recving for _ in range(3))


@attrs.define(eq=False)
class Running:
    """A request of :class:`Engine`."""

    request: Request
    blocks: tuple[int, ...]
    num_computed: int
    """As far as steps were planned."""


class Engine:
    """Plans ahead, shares prefixes and goes back after failed loads."""

    def __init__(self, double: EngineDouble, chance: random.Random) -> None:
        self.double, self.chance = double, chance
        self.running: list[Running] = []
        self.planned: deque[PlannedStep] = deque()
        self.reports: deque[WorkerOutput] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self.planned or self.reports) or any(
            each.num_computed < len(each.request.token_ids) for each in self.running
        )

    def admit(self, token_ids: tuple[int, ...]) -> None:
        """A prompt comes in. It may share what others have computed; the store is asked for the rest."""
        request = request_of(f"r{len(self.running)}", token_ids)
        shared: tuple[int, ...] = ()
        for other in self.running if self.chance.random() < 0.5 else ():
            pairs = zip(token_ids[:-1], other.request.token_ids, strict=False)
            same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            shared = max(shared, other.blocks[: min(same, other.num_computed) // BLOCK], key=len)
        start = len(shared) * BLOCK
        found, _ = self.double.matched(request, start)
        blocks = (*shared, *self.double.allocate(len(token_ids) - start))
        self.double.scheduler.update_state_after_alloc(request, (blocks,), found)
        self.running.append(Running(request, blocks, start + found))

    def plan(self) -> None:
        scheduled = []
        for each in self.running:
            rest = len(each.request.token_ids) - each.num_computed
            new = min(self.chance.choice([16, 40, 200]), rest)
            if new > 0:
                scheduled.append((each.request, each.blocks, each.num_computed, new))
                each.num_computed += new
        self.planned.append(self.double.plan(scheduled))

    def execute(self, order: CallOrder) -> None:
        self.reports.append(self.double.execute(self.planned.popleft(), order=order))

    def hear(self) -> None:
        report = self.reports.popleft()
        self.double.scheduler.update_connector_output(report)
        for each in self.running:
            for index, block in enumerate(each.blocks):
                if block in report.invalid_block_ids:
                    each.num_computed = min(each.num_computed, index * BLOCK)


@pytest.mark.parametrize("seed", range(16))
def test_whatever_fails_and_however_many_steps_are_in_flight_what_is_promised_is_right(
    seed: int, failing: Any
) -> None:
    chance = random.Random(seed)
    order, depth = chance.choice([USUAL, DRAFTING]), chance.choice([1, 3, 4])
    with EngineDouble(config("both", host=f"unix:@kvplug-test-random-{seed}"), num_blocks=512) as double:
        engine = Engine(double, chance)
        prompts = []
        for number in range(10):
            first, common, own = chance.choice([0, 1000]), chance.choice([48, 96]), chance.randrange(1, 40)
            prompts.append(
                (*range(first, first + common), *range(9000 + 100 * number, 9000 + 100 * number + own))
            )
        for first in (0, 1000):
            double.prefill(request_of(f"stored-{first}", range(first, first + 96)))
        waiting = deque(prompts)
        num_failed = 0
        engine.admit(waiting.popleft())
        while waiting:
            if chance.random() < 0.5:
                engine.admit(waiting.popleft())
            if len(engine.planned) + len(engine.reports) < depth:
                engine.plan()
            if engine.planned and chance.random() < 0.5:
                failing.now = not num_failed or chance.random() < 0.5
                engine.execute(order)
            if engine.reports and chance.random() < 0.3:
                num_failed += bool(engine.reports[0].invalid_block_ids)
                engine.hear()
        failing.now = False
        while engine.has_work:
            engine.plan()
            while engine.planned:
                engine.execute(order)
            while engine.reports:
                num_failed += bool(engine.reports[0].invalid_block_ids)
                engine.hear()
        assert num_failed
        for each in engine.running:
            assert double.is_right(each.request.token_ids, each.blocks, len(each.request.token_ids))
        for number, token_ids in enumerate(prompts):
            assert_loads(double, f"again-{number}", token_ids)


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
