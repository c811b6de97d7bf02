"""Engines of the connector "p2p" for its tests: pairs, engines of several workers, and what they hold."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import attrs

from kvplug import Config, build_connector
from kvplug.engine import CacheGroup, KVCacheConfig, Parallelism, Request, WorkerOutput
from kvplug_p2p.sharing import heads_of
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, PagedCache, PlannedStep, cache, model_of, request_of

PROMPT = range(100)
_numbers = itertools.count()


def an_address(name: str = "p2p") -> str:
    """Of an engine of this test, in this process and its children."""
    return f"unix:@kvplug-p2p-{os.getpid()}-{next(_numbers)}-{name}"


def config(role: str, p2p: Mapping[str, Any] | None = None, **more: Any) -> Config:
    """``p2p``: options of the connector; ``more``: other keys."""
    options = {**more.pop("options", {}), "p2p": {"async_load": False, **(p2p or {})}}
    given = {"connector": "p2p", "transport": "cpu", "connect_timeout_s": 20, "timeout_s": 10, **more}
    return Config.from_dict({**given, "role": role, "options": options})


@contextlib.contextmanager
def pair(
    p2p: Mapping[str, Any] | None = None,
    *,
    make: Any = FakeEngine,
    producer: Mapping[str, Any] | None = None,
    consumer: Mapping[str, Any] | None = None,
    is_met: bool = True,
    timeout_s: float = 10.0,
    **build: Any,
) -> Iterator[tuple[Any, Any]]:
    """Engines that know each other. ``producer`` and ``consumer``: more arguments of the engines."""
    host, timeouts = an_address(), {"timeout_s": timeout_s}
    with (
        make(
            config("producer", p2p, host=host, **timeouts), seed=1, **{**build, **(producer or {})}
        ) as prefill,
        make(
            config("consumer", p2p, host=an_address("decode"), peers=[f"{host}-0"], **timeouts),
            seed=2,
            **{**build, **(consumer or {})},
        ) as decode,
    ):
        decode.scheduler.wait_until_ready(20)
        if is_met:
            decode.worker.wait_until_ready(20)
        prefill.address = host
        yield prefill, decode


def stored(
    engine: FakeEngine, name: str = "stored", tokens: Any = PROMPT, params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compute a prompt and hand it off. Returns the reference to its blocks."""
    handed = engine.hand_off(request_of(name, tokens, params=params or {}))[1]
    assert handed is not None
    return handed


def loaded(engine: FakeEngine, prompt: Request) -> int:
    """Load a prompt, compute what did not come, and end the request. Returns how many tokens came."""
    num_loaded, is_async = engine.matched(prompt)
    blocks = engine.allocate(len(prompt.token_ids))
    engine.scheduler.update_state_after_alloc(prompt, (blocks,), num_loaded)
    reports = [
        engine.step([] if is_async else [(prompt, blocks, num_loaded, len(prompt.token_ids) - num_loaded)])
    ]

    def is_there() -> bool:
        return prompt.request_id in reports[-1].finished_recving or bool(reports.append(engine.step([])))

    if is_async:
        waits.until(is_there, what=f"the end of the pull of {prompt.request_id}")
    invalid = frozenset[int]().union(*(report.invalid_block_ids for report in reports))
    wrong = engine.cache.wrong_blocks(prompt.token_ids, blocks, 0, num_loaded)
    assert wrong <= invalid <= {*blocks}, f"wrong: {wrong}, reported: {invalid}"
    engine.step([(prompt, blocks, 0, len(prompt.token_ids))])
    assert engine.is_right(prompt.token_ids, blocks, len(prompt.token_ids)), (
        "what was computed was overwritten"
    )
    engine.finish(prompt, blocks)
    engine.free_blocks.extend(blocks)
    return 0 if invalid else num_loaded


def until_named(engine: FakeEngine, *names: str, within: float | None = None) -> None:
    """Run steps until all of these requests' blocks are the engine's again."""
    left = {*names}

    def is_named() -> bool:
        left.difference_update(engine.step([]).finished_sending)
        return not left

    waits.until(is_named, within, what=f"the blocks of {names}")


def failures(side: Any, op: str) -> dict[str, int]:
    """What of the operation has failed at this side since the last call, by reason."""
    found = side.get_stats() or {"failures": {}}
    return dict(found["failures"].get(op, {}))


def failures_of(engine: FakeEngine, op: str) -> dict[str, int]:
    """What has failed at the worker side of a fake engine, which takes its figures in each step."""
    return dict((engine.figures() or {"failures": {}})["failures"].get(op, {}))


# -- references ----------------------------------------------------------------------------------------

Place = tuple[Any, ...]
"""The keys and numbers that lead to a value inside of others."""


def leaves(value: Any, path: Place = ()) -> list[Place]:
    """The places of all values that are not containers, and of empty containers."""
    each = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in each for place in leaves(inner, (*path, key))] or [path]


def at(params: Any, path: Place) -> Any:
    return functools.reduce(lambda value, key: value[key], path, params)


def put(params: Any, path: Place, value: Any) -> Any:
    """Replace a value. Returns what was there."""
    inner = at(params, path[:-1])
    before, inner[path[-1]] = inner[path[-1]], value
    return before


# -- engines of several workers ------------------------------------------------------------------------


class Shard(PagedCache):
    """The heads of one worker, of ``num_heads`` of the model; 0 for latent attention."""

    def __init__(self, rank: int, size: int, num_heads: int, axes: str, **given: Any) -> None:
        self._mine = heads_of(rank, size, num_heads) if num_heads else range(1)
        self._all_heads = num_heads or 1
        with mock.patch.object(cache, "NUM_HEADS", len(self._mine)):
            super().__init__(axes, **given)

    def expected(self, token_ids: Any, start: int, end: int, layer: int) -> Any:
        with mock.patch.object(self, "num_heads", self._all_heads):
            every = super().expected(token_ids, start, end, layer)
        return every[:, :, self._mine.start : self._mine.stop]


class Shards:
    """The caches of all workers, in the place of the one of a fake engine."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shards[0], name)

    def compute(self, *args: Any) -> None:
        for shard in self.shards:
            shard.compute(*args)

    def free(self, *args: Any) -> None:
        for shard in self.shards:
            shard.free(*args)

    def wrong_blocks(self, *args: Any) -> frozenset[int]:
        return frozenset().union(*(shard.wrong_blocks(*args) for shard in self.shards))

    def written(self, *args: Any) -> frozenset[int]:
        return frozenset().union(*(shard.written(*args) for shard in self.shards))

    def is_right(self, *args: Any) -> bool:
        return all(shard.is_right(*args) for shard in self.shards)


class Workers:
    """The worker sides of one engine, which reports as one: what ended in all of them has ended."""

    def __init__(self, workers: list[Any], shards: list[Shard]) -> None:
        self.workers, self._shards = workers, shards
        self._named: dict[str, dict[str, int]] = {"sent": {}, "received": {}}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            first, *_ = [getattr(worker, name)(*args) for worker in self.workers]
            return first

        return call

    def register_kv_caches(self, kv_caches: Any) -> None:
        for worker, shard in zip(self.workers, self._shards, strict=True):
            worker.register_kv_caches(shard.tensors)

    def has_connector_metadata(self) -> bool:
        return any(worker.has_connector_metadata() for worker in self.workers)

    def get_finished(self, finished: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        found = []
        for names, now in zip(
            self._named.values(), zip(*(each.get_finished(finished) for each in self.workers)), strict=True
        ):
            for name in itertools.chain(*now):
                names[name] = names.get(name, 0) + 1
            done = {name for name, count in names.items() if count == len(self.workers)}
            for name in done:
                del names[name]
            found.append(frozenset(done))
        return found[0], found[1]

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return frozenset().union(*(worker.get_block_ids_with_load_errors() for worker in self.workers))

    def build_worker_metadata(self) -> Any:
        every = [worker.build_worker_metadata() for worker in self.workers]
        return [each for each in every if each is not None] or None


class Sharded(FakeEngine):
    """An engine whose model has ``num_heads`` heads, or latent attention (0), split over ``size`` workers."""

    def __init__(
        self,
        given: Config,
        *,
        size: int,
        num_heads: int,
        axes: str = "KBTHD",
        block_size: int = 16,
        num_blocks: int = 64,
        block_format: str = "",
        seed: int = 0,
    ) -> None:
        built = {"block_size": block_size, "num_blocks": num_blocks}
        self.shards = [
            Shard(rank, size, num_heads, axes, seed=10 * seed + rank, **built) for rank in range(size)
        ]
        first = self.shards[0]
        layout = attrs.evolve(first.layout, block_format=block_format)
        groups = (CacheGroup(layer_names=first.layer_names, layout=layout),)
        super().__init__(
            given,
            axes=axes,
            seed=seed,
            make=self._make,
            model=attrs.evolve(model_of(axes), num_kv_heads=num_heads or 1),
            parallelism=Parallelism(num_workers=size, tensor_size=size),
            cache=KVCacheConfig(groups=groups, num_blocks=num_blocks),
            **built,
        )
        self.cache: Any = Shards(self.shards)

    def _make(self, given: Config, side: str, *, parallelism: Parallelism, **build: Any) -> Any:
        if side == "scheduler":
            return build_connector(given, side, parallelism=parallelism, **build)
        with contextlib.ExitStack() as made:
            workers = []
            for rank in range(parallelism.num_workers):
                place = attrs.evolve(parallelism, worker_rank=rank, tensor_rank=rank)
                workers.append(build_connector(given, side, parallelism=place, **build))
                made.callback(workers[-1].shutdown)
            made.pop_all()
        return Workers(workers, self.shards)

    def report(self, planned: PlannedStep) -> WorkerOutput:
        report = super().report(planned)
        parts = tuple(itertools.chain(*report.worker_metadata))
        return attrs.evolve(report, worker_metadata=parts)
