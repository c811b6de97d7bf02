"""Several KV cache groups: full attention beside layers with a window, whose early blocks are freed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from kvplug import ConfigError, UnsupportedError, build_connector
from kvplug.engine import (
    NO_BLOCK,
    CacheGroup,
    KVCacheConfig,
    KVLayout,
    LayoutError,
    Request,
    RequestEnd,
    SchedulerOutput,
    WorkerOutput,
)
from kvplug.transport import Deadline, Job, PutReason
from kvplug.transport.store.store import Store
from kvplug_testing.engine import FakeEngine, PlannedStep, layout_of, model_of, request_of
from lookup_engines import an_address, config, num_held, tokens

pytestmark = pytest.mark.timeout(60)

LAYERS, BLOCK, BLOCKS, WINDOW = 4, 16, 256, 40
WINDOWED = ((0,), (2,))
"""The layers of each group with a window. The last group has the others, which attend to all tokens."""
PROMPT = range(200)

Table = list[int]


class GroupedScheduler:
    """The scheduler side, whose engine gives each request the block tables of all groups."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def update_state_after_alloc(self, request: Request, tables: Any, found: int) -> None:
        self._scheduler.update_state_after_alloc(request, tuple(map(tuple, tables[0])), found)

    def request_finished(self, request: Request, tables: Any, end: RequestEnd) -> Any:
        return self._scheduler.request_finished(request, tuple(map(tuple, tables[0])), end)

    def build_connector_meta(self, output: SchedulerOutput) -> Any:
        tables_of = output.block_ids
        block_ids = lambda request_id: tuple(map(tuple, tables_of(request_id)[0]))  # noqa: E731
        return self._scheduler.build_connector_meta(attrs.evolve(output, block_ids=block_ids))


class GroupedEngine(FakeEngine):
    """Has a cache with three groups; the blocks of a request are a table for each, and go as in vLLM."""

    def __init__(self, given: Any, *, is_grouped: bool = True, **build: Any) -> None:
        names = [f"layers.{layer}" for layer in range(LAYERS)]
        windowed = WINDOWED if is_grouped else ()
        full = [layer for layer in range(LAYERS) if not any(layer in group for group in windowed)]
        self.groups = [*((list(group), WINDOW) for group in windowed), (full, None)]
        groups = tuple(
            CacheGroup(
                layer_names=tuple(names[layer] for layer in layers),
                layout=layout_of("BHTKD", BLOCK, BLOCKS),
                window=window,
            )
            for layers, window in self.groups
        )
        cache = KVCacheConfig(groups=groups, num_blocks=BLOCKS, forward_order=tuple(names))
        super().__init__(given, axes="BHTKD", num_layers=LAYERS, num_blocks=BLOCKS, cache=cache, **build)
        self.scheduler = GroupedScheduler(self.scheduler)

    def allocate(self, num_tokens: int, computed: int = 0) -> Any:
        """Block tables; a window's blocks wholly before what it attends to after ``computed`` are absent."""
        count, tables = -(-num_tokens // BLOCK), []
        for _, window in self.groups:
            absent = 0 if window is None else max(0, computed - window + 1) // BLOCK
            tables.append([NO_BLOCK] * absent + list(super().allocate((count - absent) * BLOCK)))
        return tables

    def plan(self, scheduled: list[Any], **given: Any) -> PlannedStep:
        """Before it, blocks that no token attends to any more are freed: others write into them at once."""
        for _, tables, computed, _ in scheduled:
            for table, (layers, window) in zip(tables, self.groups, strict=True):
                for at in range(0 if window is None else max(0, computed - window + 1) // BLOCK):
                    if table[at] != NO_BLOCK:
                        for layer in layers:
                            self.cache.write(layer, [table[at]], -1.0)
                        table[at] = NO_BLOCK
        return super().plan(scheduled, **given)

    def visit(self, layer: int, planned: PlannedStep, *, compute: bool = True) -> None:
        name = self.layer_names[layer]
        self.worker.wait_for_layer_load(name)
        for request, tables, computed, new in planned.scheduled if compute else ():
            self.compute_layer(layer, request, tables, computed, computed + new)  # type: ignore[arg-type]
        self.worker.save_kv_layer(name, self.kv_caches[name])

    def compute_layer(self, layer: int, request: Request, tables: list[Table], start: int, end: int) -> None:
        """KV of these tokens; wrong if that of tokens that the layer attends to is wrong."""
        right = self.holds(request, tables, start, layers=[layer])
        table = tables[self.group_of(layer)]
        kv = self.cache.expected(request.token_ids, start, end, layer)
        self.cache.write(layer, self.cache.at(table, start, end), kv + (0 if right else 0.5))

    def fill(self, request: Request, tables: list[Table], end: int) -> None:
        """The right KV of tokens before ``end``, in the blocks that there are."""
        for layer in range(LAYERS):
            table = tables[self.group_of(layer)]
            start = min(end, table.count(NO_BLOCK) * BLOCK)
            kv = self.cache.expected(request.token_ids, start, end, layer)
            self.cache.write(layer, self.cache.at(table, start, end), kv)

    def group_of(self, layer: int) -> int:
        return next(at for at, (layers, _) in enumerate(self.groups) if layer in layers)

    def holds(self, request: Request, tables: list[Table], end: int, *, layers: Any = range(LAYERS)) -> bool:
        """Whether the blocks hold all that the token after ``end`` attends to."""
        for layer in layers:
            number = self.group_of(layer)
            window = self.groups[number][1]
            start = 0 if window is None else max(0, end - window + 1)
            if self.cache.wrong_in(layer, request.token_ids, tables[number], start, end):
                return False
        return True

    def load_after(self, request: Request, computed: int = 0) -> tuple[list[Table], int, WorkerOutput]:
        """As :meth:`load`, where the engine's own cache has so many tokens."""
        found, _ = self.matched(request, computed)
        tables = self.allocate(len(request.token_ids), computed + found)
        self.fill(request, tables, computed)
        self.scheduler.update_state_after_alloc(request, (tables,), found)
        rest = len(request.token_ids) - computed - found
        return tables, found, self.step([(request, tables, computed + found, rest)])


@contextmanager
def pair(*, producer: bool = True, consumer: bool = True) -> Iterator[tuple[GroupedEngine, GroupedEngine]]:
    """Whether each engine groups its layers."""
    with (
        GroupedEngine(config("producer"), is_grouped=producer, listen="unix:") as prefill,
        GroupedEngine(config("consumer"), is_grouped=consumer, connect=prefill.worker.contact) as decode,
    ):
        yield prefill, decode


@pytest.mark.parametrize(
    ("chunk", "producer", "consumer"),
    [(None, True, True), (50, True, False), (7, False, True)],
    ids=["groups to groups", "groups to one group", "one group to groups"],
)
def test_pages_do_not_depend_on_the_groups(chunk: int | None, producer: bool, consumer: bool) -> None:
    with pair(producer=producer, consumer=consumer) as (prefill, decode):
        prompt = request_of("a", PROMPT)
        tables = prefill.prefill(prompt, chunk=chunk)
        assert prefill.holds(prompt, tables, 200)
        assert num_held(prefill) == 12, "also those whose first blocks a window let go later"
        tables, found, report = decode.load_after(request_of("b", PROMPT))
        assert (found, report.invalid_block_ids) == (192, frozenset())
        assert decode.holds(prompt, tables, 200)


@pytest.mark.parametrize("computed", [16, 96, 176])
def test_a_load_begins_at_the_end_of_the_engines_own_cache(computed: int) -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", PROMPT)
        prefill.prefill(prompt)
        tables, found, report = decode.load_after(prompt, computed)
        assert (found, report.invalid_block_ids) == (192 - computed, frozenset())
        assert decode.holds(prompt, tables, 200)


def test_a_load_that_fails_names_the_blocks_of_every_group() -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", PROMPT)
        prefill.prefill(prompt)
        assert num_held(prefill) == 12
        forget = prefill.worker.first_tier.store.submit_remove
        ask = decode.scheduler.update_state_after_alloc

        def ask_for_what_is_gone(*arguments: Any) -> None:
            forget(None).wait(10)
            ask(*arguments)

        decode.scheduler.update_state_after_alloc = ask_for_what_is_gone
        tables, found, report = decode.load_after(prompt)
        loaded = {block for table in tables for block in table[: found // BLOCK]} - {NO_BLOCK}
        assert (found, report.invalid_block_ids) == (192, loaded)
        decode.scheduler.update_state_after_alloc = ask
        assert decode.scheduler.get_num_new_matched_tokens(prompt, 0) == (0, False), "not again"


def test_a_table_without_a_block_that_is_needed_is_a_failed_load() -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", PROMPT)
        prefill.prefill(prompt)
        allocate = decode.allocate
        decode.allocate = lambda total, computed: allocate(total, computed + BLOCK)  # type: ignore[method-assign]
        decode.compute_layer = lambda *_: None  # type: ignore[method-assign]
        tables, found, report = decode.load_after(prompt)
        assert found == 192
        assert report.invalid_block_ids >= set(tables[2][:12])


def test_generated_tokens_are_saved_while_the_window_moves() -> None:
    with pair() as (prefill, decode):
        whole = request_of("a", tokens(330))
        tables = prefill.admit(whole)
        prefill.step([(whole, tables, 0, 200)])
        for computed in range(200, 330):
            prefill.step([(whole, tables, computed, 1)])
        prefill.finish(whole, tables)
        prefill.settle()
        assert num_held(prefill) == 20
        tables, found, _ = decode.load_after(request_of("b", tokens(330)))
        assert found == 320
        assert decode.holds(whole, tables, 330)


def test_a_prompt_whose_beginning_was_in_the_engines_cache_is_saved_from_there_on() -> None:
    with GroupedEngine(config("producer"), listen="unix:") as prefill:
        prompt = request_of("a", PROMPT)
        assert prefill.matched(prompt, 96) == (0, False)
        tables = prefill.allocate(200, 96)
        prefill.fill(prompt, tables, 96)
        prefill.scheduler.update_state_after_alloc(prompt, (tables,), 0)
        prefill.step([(prompt, tables, 96, 104)])
        # The window lacks the blocks of tokens before 48, so that no page before has all its layers.
        assert num_held(prefill) == 12 - 48 // BLOCK


# -- refusals ---------------------------------------------------------------------------------------


def test_pages_longer_than_a_window_and_groups_whose_blocks_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pages of 48 tokens: layers with a window of 40 .* at most 40"):
        GroupedEngine(config("both", {"page_tokens": 48}))
    groups = tuple(
        CacheGroup(layer_names=(name,), layout=KVLayout("BHTKD", {"B": 8, "T": 16, "H": 2, "D": size}))
        for name, size in (("a", 8), ("b", 16))
    )
    for order in ((), ("a",), ("a", "b", "b")):
        with pytest.raises(LayoutError, match="it must name each layer of the groups once"):
            KVCacheConfig(groups=groups, num_blocks=8, forward_order=order)
    cache = KVCacheConfig(groups=groups, num_blocks=8, forward_order=("b", "a"))
    with pytest.raises(UnsupportedError, match=r"blocks of group 1 .* differ from those of group 0"):
        build_connector(config("both"), "scheduler", model=model_of("BHTKD", 2), cache=cache)


def test_no_store_reads_blocks_of_a_cache_with_windows_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request may have them then, and no call reports it."""

    def submit_put(_: Store, pages: Any, **__: Any) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), Deadline.after(None))
        job.on_cancel(lambda: job.set([PutReason.CANCELLED] * job.count))
        return job

    monkeypatch.setattr(Store, "submit_put", submit_put)
    with GroupedEngine(config("both", {"max_unsaved": 1}, host=an_address("windows"))) as engine:
        prompt = request_of("a", PROMPT)
        engine.step([(prompt, engine.admit(prompt), 0, 200)])
        assert engine.worker.saver.read_until == 1
