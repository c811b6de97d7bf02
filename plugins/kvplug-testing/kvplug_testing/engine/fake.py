"""A fake engine without a model, which calls both sides of the connector in the documented order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs

from kvplug import Config, build_connector
from kvplug.engine import (
    CacheGroup,
    KVCacheConfig,
    ModelInfo,
    Parallelism,
    Plain,
    Request,
    RequestEnd,
    ScheduledRequest,
    SchedulerOutput,
    TransferStats,
    WorkerOutput,
)
from kvplug.net.wire import Limits, decode, encode
from kvplug_testing.engine.cache import NUM_LAYERS, PagedCache, model_of

_LIMITS = Limits(max_bytes=64 << 20, max_items=1 << 24)

PATIENCE_S = 30.0
"""How long a connector may take for work that needs further steps, or may answer "not yet"."""

Scheduled = tuple[Request, tuple[int, ...], int, int]
"""A request in a step: the request, its blocks, the tokens computed earlier and those of this step."""


@attrs.frozen(kw_only=True)
class CallOrder:
    """When an engine makes the calls of a step whose order is not fixed; see ``WorkerConnector``."""

    loads_after_forward: bool = False
    """``start_load_kv`` is called after the forward pass, if all loads of the step are in the background."""
    drafts: bool = False
    """The last layer is a draft model's: its calls, ``wait_for_save`` and ``clear_connector_metadata``
    come after the step's reports.
    """


@attrs.frozen(kw_only=True)
class PlannedStep:
    """The data of a step that goes from the scheduler side to the worker side, of connector and engine."""

    scheduled: tuple[Scheduled, ...]
    """What is computed in it."""
    preempted: frozenset[str]
    """Ids of the requests that lost their blocks."""
    metadata: Plain
    """What ``build_connector_meta`` returned, encoded and decoded."""
    finished: frozenset[str] = frozenset()
    """Ids of the requests that ended since the step before."""
    number: int = 0
    """The number of the step; the first is 1."""


class FakeEngine:
    """Both sides of one engine's connector around a paged cache of random numbers.

    :func:`~kvplug_testing.engine.kv_of` defines the KV of a token, so that loaded KV can be checked; KV
    computed after wrong KV is wrong. Everything that passes between the two sides is encoded to bytes and
    decoded, so that only plain values can pass.
    """

    def __init__(
        self,
        config: Config,
        *,
        axes: str = "KBTHD",
        num_blocks: int = 64,
        num_layers: int = NUM_LAYERS,
        model: ModelInfo | None = None,
        make: Callable[..., Any] = build_connector,
        block_size: int = 16,
        block_format: str = "",
        seed: int = 0,
        device: str = "cpu",
        **build: Any,
    ) -> None:
        """
        Args:
            axes, num_blocks, num_layers, block_size, block_format, seed, device: of the :class:`PagedCache`.
            make: builds a side of the connector, like ``build_connector``.
            build: more arguments for ``make``.
        """
        self.cache = PagedCache(axes, block_size, num_blocks, block_format, num_layers, seed, device)
        """Its paged cache."""
        self.block_size = block_size
        """Tokens in a block."""
        self.layer_names, self.layout = self.cache.layer_names, self.cache.layout
        self.kv_caches = self.cache.tensors
        """The tensors of the cache, by the names of the layers, as the connector gets them."""
        groups = (CacheGroup(layer_names=self.layer_names, layout=self.layout),)
        build.setdefault("parallelism", Parallelism())
        build.setdefault("cache", KVCacheConfig(groups=groups, num_blocks=num_blocks))
        if model is None:  # each worker has as many heads as the fake's cache
            model = model_of(axes, num_layers)
            heads = model.num_kv_heads * build["parallelism"].tensor_size
            model = attrs.evolve(model, num_kv_heads=heads)
        import torch

        self.free_blocks: list[int] = torch.randperm(num_blocks, generator=self.cache.random).tolist()
        """Blocks of no request: :meth:`allocate` takes the first ones."""
        self.step_number = 0
        """The number of the step that was planned last."""
        self._stats = TransferStats()
        self._ended: set[str] = set()
        self.kept: dict[str, tuple[int, ...]] = {}
        """The blocks of requests that have ended, by id, until the request is named as sent or received."""
        self.lent: set[str] = set()
        """Of these requests those whose blocks are kept for another engine, which has a reference to them."""
        with ExitStack() as made:
            self.worker: Any = make(config, "worker", model=model, **build)
            """The connector's worker side."""
            made.callback(self.worker.shutdown)
            self.scheduler: Any = make(config, "scheduler", model=model, **build)
            """The connector's scheduler side."""
            made.callback(self.scheduler.shutdown)
            self.begin()
            made.pop_all()

    def begin(self) -> None:
        """Make the calls at start."""
        self.worker.register_kv_caches(self.kv_caches)
        handshake = roundtrip(self.worker.get_handshake_metadata(), "what get_handshake_metadata returned")
        self.scheduler.set_xfer_handshake_metadata({} if handshake is None else {0: handshake})

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    # -- the cache -----------------------------------------------------------------------------

    def compute(self, token_ids: tuple[int, ...], block_ids: tuple[int, ...], start: int, end: int) -> None:
        """Write every layer's KV of the tokens ``start`` to ``end`` into their blocks, without a step."""
        for layer in range(len(self.layer_names)):
            self.cache.compute(layer, token_ids, block_ids, start, end)

    def is_right(self, token_ids: tuple[int, ...], block_ids: tuple[int, ...], end: int) -> bool:
        """Whether the first ``end`` tokens' KV is in the blocks, in every layer."""
        return self.cache.is_right(token_ids, block_ids, end)

    # -- requests ------------------------------------------------------------------------------

    def allocate(self, num_tokens: int) -> tuple[int, ...]:
        """Free blocks for this many tokens.

        Raises:
            ValueError: there are too few.
        """
        count = -(-num_tokens // self.block_size)
        blocks, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        if len(blocks) < count:
            raise ValueError(f"{count} blocks are needed, and {len(blocks)} are free: raise num_blocks")
        return tuple(blocks)

    def admit(self, request: Request) -> tuple[int, ...]:
        """Start a request that loads nothing; returns its blocks."""
        blocks = self.allocate(len(request.token_ids))
        self.scheduler.on_new_request(request)
        self.scheduler.update_state_after_alloc(request, (blocks,), 0)
        return blocks

    def matched(self, request: Request, num_computed: int = 0) -> tuple[int, bool]:
        """Start a request, and :meth:`ask` about it."""
        self.scheduler.on_new_request(request)
        return self.ask(request, num_computed)

    def ask(self, request: Request, num_computed: int = 0) -> tuple[int, bool]:
        """How many tokens can be loaded, and whether in the background; repeats while the answer is "not
        yet".
        """
        limit = time.monotonic() + PATIENCE_S
        while True:
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed)
            if found is not None:
                return found, is_async
            assert time.monotonic() < limit, f"get_num_new_matched_tokens: 'not yet' for {PATIENCE_S} s"
            time.sleep(0.0005)

    def finish(
        self, request: Request, block_ids: tuple[int, ...], end: RequestEnd = RequestEnd.FINISHED
    ) -> tuple[bool, dict[str, Any] | None]:
        """End the request; returns the answer of ``request_finished``."""
        keeps, params = self.scheduler.request_finished(request, (block_ids,), end)
        self._ended.add(request.request_id)
        if keeps:
            self.kept[request.request_id] = block_ids
            if params is not None:
                self.lent.add(request.request_id)
        return keeps, roundtrip(params, "the kv_transfer_params of request_finished")

    def settle(self) -> None:
        """Run steps without requests until the connector has no work left and has named all requests with
        kept blocks, except those whose blocks are kept for another engine.

        Raises:
            AssertionError: this does not end in time.
        """
        limit = time.monotonic() + PATIENCE_S
        while self.kept.keys() - self.lent or self.scheduler.has_pending_push_work():
            late = f"after {PATIENCE_S} s blocks of {sorted(self.kept)} are kept, or work is pending"
            assert time.monotonic() < limit, late
            self.step([])

    # -- steps ---------------------------------------------------------------------------------

    def step(
        self, scheduled: list[Scheduled], *, compute: bool = True, order: CallOrder = CallOrder()
    ) -> WorkerOutput:
        """One engine step over (request, block_ids, num_computed, num_scheduled)."""
        report = self.execute(self.plan(scheduled), compute=compute, order=order)
        self.hear(report)
        return report

    def plan(self, scheduled: list[Scheduled], *, preempted: frozenset[str] = frozenset()) -> PlannedStep:
        """The scheduler side's half of a step. Several may be planned before the first is executed."""
        self.step_number += 1
        tables = {request.request_id: (blocks,) for request, blocks, *_ in scheduled}
        ended, self._ended = frozenset(self._ended), set()
        output = SchedulerOutput(
            step=self.step_number,
            scheduled=tuple(
                ScheduledRequest(
                    request_id=request.request_id, num_computed_tokens=computed, num_scheduled_tokens=new
                )
                for request, _, computed, new in scheduled
            ),
            block_ids=tables.__getitem__,
            token_ids={request.request_id: request.token_ids for request, *_ in scheduled}.__getitem__,
            preempted_request_ids=preempted,
            finished_request_ids=ended,
        )
        metadata = self.scheduler.build_connector_meta(output)
        tables.clear()  # a later lookup finds nothing, as in a real engine
        return PlannedStep(
            scheduled=tuple(scheduled),
            preempted=preempted,
            metadata=roundtrip(metadata, "what build_connector_meta returned"),
            finished=ended,
            number=self.step_number,
        )

    def execute(
        self, planned: PlannedStep, *, compute: bool = True, order: CallOrder = CallOrder()
    ) -> WorkerOutput:
        """The worker side's half; returns its report, for :meth:`hear`.

        If nothing is scheduled, there is no forward pass and no layer is visited.
        """
        worker, num_layers = self.worker, len(self.layer_names) if planned.scheduled else 0
        if planned.preempted:
            worker.handle_preemptions(planned.preempted)
        worker.bind_connector_metadata(planned.metadata)
        drafting = max(0, num_layers - order.drafts)
        if not order.loads_after_forward:
            worker.start_load_kv()
        for layer in range(drafting):
            self.visit(layer, planned, compute=compute)
        if order.loads_after_forward:
            worker.start_load_kv()
        if not order.drafts:
            worker.wait_for_save()
        report = self.report(planned)
        if order.drafts:
            for layer in range(drafting, num_layers):
                self.visit(layer, planned, compute=compute)
            worker.wait_for_save()
        worker.clear_connector_metadata()
        return report

    def report(self, planned: PlannedStep) -> WorkerOutput:
        """The worker side's report at the end of a step."""
        worker = self.worker
        sending, receiving = worker.get_finished(planned.finished)
        invalid = worker.get_block_ids_with_load_errors()
        stats = roundtrip(worker.get_stats(), "what get_stats returned")
        if stats is not None:
            self._stats.merge(stats)
        list(worker.take_events())
        metadata = roundtrip(worker.build_worker_metadata(), "what build_worker_metadata returned")
        return WorkerOutput(
            finished_sending=frozenset(sending),
            finished_recving=frozenset(receiving),
            invalid_block_ids=frozenset(invalid),
            worker_metadata=() if metadata is None else (metadata,),
            stats=stats,
        )

    def hear(self, report: WorkerOutput) -> None:
        """Give the worker side's report of a step to the scheduler side."""
        self.scheduler.update_connector_output(report)
        list(self.scheduler.take_events())
        for request_id in report.finished_sending | report.finished_recving:
            self.kept.pop(request_id, None)
            self.lent.discard(request_id)

    def figures(self) -> Mapping[str, Any] | None:
        """The worker side's stats since the last call, as a snapshot; ``None`` if there are none."""
        left = self.worker.get_stats()
        if left is not None:
            self._stats.merge(left)
        found, self._stats = self._stats.take(), TransferStats()
        return found

    def visit(self, layer: int, planned: PlannedStep, *, compute: bool = True) -> None:
        """Run one attention layer of the forward pass."""
        name = self.layer_names[layer]
        has_work = self.worker.has_connector_metadata()
        if has_work:
            self.worker.wait_for_layer_load(name)
        for request, blocks, computed, new in planned.scheduled if compute else ():
            self.cache.compute(layer, request.token_ids, blocks, computed, computed + new)
        if has_work:
            self.worker.save_kv_layer(name, self.kv_caches[name])

    # -- whole requests ------------------------------------------------------------------------

    def prefill(self, request: Request, *, chunk: int | None = None) -> tuple[int, ...]:
        """Compute a whole prompt, in chunks, and end the request. Returns its blocks."""
        return self.hand_off(request, chunk=chunk)[0]

    def hand_off(
        self, request: Request, *, chunk: int | None = None
    ) -> tuple[tuple[int, ...], dict[str, Any] | None]:
        """Like :meth:`prefill`; also returns the ``kv_transfer_params``."""
        total = len(request.token_ids)
        blocks = self.admit(request)
        for start in range(0, total, chunk or total):
            self.step([(request, blocks, start, min(chunk or total, total - start))])
        _, params = self.finish(request, blocks)
        self.settle()
        return blocks, params

    def load(self, request: Request) -> tuple[tuple[int, ...], int, WorkerOutput]:
        """Match, allocate, and run the step that loads. Returns (blocks, tokens loaded, report)."""
        num_loaded, is_async = self.matched(request)
        blocks = self.allocate(len(request.token_ids))
        self.scheduler.update_state_after_alloc(request, (blocks,), num_loaded)
        rest = len(request.token_ids) - num_loaded
        return blocks, num_loaded, self.step([] if is_async else [(request, blocks, num_loaded, rest)])


def request_of(
    request_id: str,
    token_ids: Iterable[int],
    *,
    extra: bytes = b"",
    params: Mapping[str, Any] | None = None,
) -> Request:
    """A request whose tokens are all prompt."""
    tokens = tuple(token_ids)
    return Request(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        extra=extra,
        params=dict(params or {}),
    )


def roundtrip(value: Any, what: str) -> Any:
    """The value as the other side of a connector receives it: in an engine that is another process.

    Raises:
        AssertionError: a part is not :data:`kvplug.engine.connector.values.Plain`; the message names it.
    """
    _check(value, what)
    return decode(encode(value, limits=_LIMITS), limits=_LIMITS)


def _check(value: Any, where: str) -> None:
    kind = type(value)
    if kind in (list, tuple):
        for index, each in enumerate(value):
            if type(each) is not int:
                _check(each, f"{where}[{index}]")
    elif kind is dict:
        for key, each in value.items():
            _check(key, f"a key of {where}")
            _check(each, f"{where}[{key!r}]")
    elif value is not None and kind not in (bool, int, float, str, bytes):
        raise AssertionError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}: only plain values cross between the sides"
        )
