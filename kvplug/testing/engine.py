"""A model-free engine: enough of one to drive both sides of the connector in the documented order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.build import build_connector
from kvplug.config import Config
from kvplug.connector.values import (
    CacheGroup,
    KVCacheConfig,
    Parallelism,
    Plain,
    Request,
    RequestEnd,
    ScheduledRequest,
    SchedulerOutput,
    WorkerOutput,
)
from kvplug.layout import KVLayout
from kvplug.model import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 3, 2, 8
MODEL = ModelInfo(
    name="double", num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype="float32"
)


def layout_of(axes: str, block_size: int, num_blocks: int, block_format: str = "") -> KVLayout:
    sizes = {"K": 2, "B": num_blocks, "T": block_size, "H": NUM_HEADS, "D": HEAD_SIZE}
    return KVLayout(axes, sizes, block_format=block_format)


Scheduled = tuple[Request, tuple[int, ...], int, int]
"""A request in a step: itself, its blocks, the tokens computed before it and those that it computes."""


@attrs.frozen(kw_only=True)
class CallOrder:
    """Where an engine makes those calls of a step that have no fixed place; see ``WorkerConnector``."""

    loads_after_forward: bool = False
    """``start_load_kv`` comes after the forward pass; for a step whose loads are all in the background."""
    drafts: bool = False
    """The last layer is a draft model's: it, ``wait_for_save`` and ``clear_connector_metadata`` come after
    the step's reports."""


@attrs.frozen(kw_only=True)
class PlannedStep:
    """What passes from the scheduler side to the worker side, connector and engine alike."""

    scheduled: tuple[Scheduled, ...]
    preempted: frozenset[str]
    metadata: Plain


class EngineDouble:
    """Both sides of one engine's connector around a paged cache of random numbers.

    :func:`kv_of` says what the KV of a token "is": a pure function of (token, position, layer), so that
    what is loaded can be checked against what should have been computed.
    """

    def __init__(
        self,
        config: Config,
        *,
        axes: str = "KBTHD",
        block_size: int = 16,
        num_blocks: int = 64,
        block_format: str = "",
        model: ModelInfo = MODEL,
        seed: int = 0,
        **build: Any,
    ) -> None:
        """``block_format``: its kernel keeps each head's block transposed (axes KBHTD only)."""
        if block_format and axes != "KBHTD":
            raise ValueError(f"the kernel with its own block format wants KBHTD, not {axes}")
        self.block_size = block_size
        self.layer_names = tuple(f"layers.{index}" for index in range(NUM_LAYERS))
        self.layout = layout_of(axes, block_size, num_blocks, block_format)
        cache = KVCacheConfig(
            groups=(CacheGroup(layer_names=self.layer_names, layout=self.layout),), num_blocks=num_blocks
        )
        import torch

        random = torch.Generator().manual_seed(seed)
        self.kv_caches = {name: torch.randn(self.layout.shape, generator=random) for name in self.layer_names}
        arguments: dict[str, Any] = dict(model=model, cache=cache, parallelism=Parallelism(), **build)
        self.worker: Any = None
        self.worker = build_connector(config, "worker", **arguments)
        try:
            self.scheduler: Any = build_connector(config, "scheduler", **arguments)
        except BaseException:
            self.worker.shutdown()
            raise
        self.worker.register_kv_caches(self.kv_caches)
        self.weights = 0.0
        """What the KV depends on besides its tokens. Who changes it resets the scheduler side's cache."""
        self.step_number = 0
        self.free_blocks: list[int] = torch.randperm(num_blocks, generator=random).tolist()

    def __enter__(self) -> EngineDouble:
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    # -- the cache -----------------------------------------------------------------------------

    def slot(self, layer_name: str, block_ids: tuple[int, ...], position: int) -> tuple[Any, Any]:
        """Views of the key and the value of one token: [num_heads, head_size] each."""
        at = {"B": block_ids[position // self.block_size], "T": position % self.block_size}
        if self.layout.block_format:
            block = self.kv_caches[layer_name][:, at["B"]].view(2, NUM_HEADS, HEAD_SIZE, self.block_size)
            return block[0, :, :, at["T"]], block[1, :, :, at["T"]]
        axes = self.layout.axes.replace("KD", "D") if self.layout.is_packed else self.layout.axes

        def pick(k: int) -> Any:
            return self.kv_caches[layer_name][tuple({**at, "K": k}.get(axis, slice(None)) for axis in axes)]

        if self.layout.is_packed:
            both = pick(0)
            return both[..., :HEAD_SIZE], both[..., HEAD_SIZE:]
        return pick(0), pick(1)

    def compute(self, token_ids: tuple[int, ...], block_ids: tuple[int, ...], start: int, end: int) -> None:
        for layer in range(NUM_LAYERS):
            self._compute_layer(layer, token_ids, block_ids, start, end)

    def _compute_layer(
        self, layer: int, token_ids: tuple[int, ...], block_ids: tuple[int, ...], start: int, end: int
    ) -> None:
        for position in range(start, end):
            key, value = self.slot(self.layer_names[layer], block_ids, position)
            kv = (1 + self.weights) * kv_of(token_ids[position], position, layer)
            key.copy_(kv)
            value.copy_(-kv)

    def is_right(self, token_ids: tuple[int, ...], block_ids: tuple[int, ...], end: int) -> bool:
        import torch

        for layer, name in enumerate(self.layer_names):
            for position in range(end):
                key, value = self.slot(name, block_ids, position)
                expected = (1 + self.weights) * kv_of(token_ids[position], position, layer)
                if not (torch.equal(key, expected) and torch.equal(value, -expected)):
                    return False
        return True

    # -- requests ------------------------------------------------------------------------------

    def allocate(self, num_tokens: int) -> tuple[int, ...]:
        count = -(-num_tokens // self.block_size)
        blocks, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        return tuple(blocks)

    def matched(self, request: Request, num_computed: int = 0) -> tuple[int, bool]:
        """Ask until the answer is no longer "not yet"."""
        self.scheduler.on_new_request(request)
        while True:
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed)
            if found is not None:
                return found, is_async

    def step(
        self,
        scheduled: list[Scheduled],
        *,
        compute: bool = True,
        preempted: frozenset[str] = frozenset(),
        order: CallOrder = CallOrder(),
    ) -> WorkerOutput:
        """One engine step over (request, block_ids, num_computed, num_scheduled)."""
        report = self.execute(self.plan(scheduled, preempted=preempted), compute=compute, order=order)
        self.scheduler.update_connector_output(report)
        return report

    def plan(self, scheduled: list[Scheduled], *, preempted: frozenset[str] = frozenset()) -> PlannedStep:
        """The scheduler side's half of a step. Several may be planned before the first is executed."""
        self.step_number += 1
        tables = {request.request_id: (blocks,) for request, blocks, *_ in scheduled}
        output = SchedulerOutput(
            step=self.step_number,
            scheduled=tuple(
                ScheduledRequest(
                    request_id=request.request_id, num_computed_tokens=computed, num_scheduled_tokens=new
                )
                for request, _, computed, new in scheduled
            ),
            block_ids=tables.__getitem__,
            preempted_request_ids=preempted,
        )
        metadata = self.scheduler.build_connector_meta(output)
        tables.clear()  # who looks later finds nothing, as with an engine that has moved on
        return PlannedStep(scheduled=tuple(scheduled), preempted=preempted, metadata=metadata)

    def execute(
        self, planned: PlannedStep, *, compute: bool = True, order: CallOrder = CallOrder()
    ) -> WorkerOutput:
        """The worker side's half: what it reports, for ``scheduler.update_connector_output``.

        Without anything scheduled there is no forward pass, and no layer is visited.
        """
        worker = self.worker
        if planned.preempted:
            worker.handle_preemptions(planned.preempted)
        worker.bind_connector_metadata(planned.metadata)
        drafting = NUM_LAYERS - 1 if order.drafts else NUM_LAYERS
        if not order.loads_after_forward:
            worker.start_load_kv()
        self._forward(planned, range(drafting), compute)
        if order.loads_after_forward:
            worker.start_load_kv()
        if not order.drafts:
            worker.wait_for_save()
        sending, receiving = worker.get_finished(frozenset())
        invalid = worker.get_block_ids_with_load_errors()
        said = worker.build_worker_metadata()
        report = WorkerOutput(
            finished_sending=sending,
            finished_recving=receiving,
            invalid_block_ids=invalid,
            worker_metadata=() if said is None else (said,),
        )
        if order.drafts:
            self._forward(planned, range(drafting, NUM_LAYERS), compute)
            worker.wait_for_save()
        worker.clear_connector_metadata()
        return report

    def _forward(self, planned: PlannedStep, layers: range, compute: bool) -> None:
        for layer in layers if planned.scheduled else ():
            name = self.layer_names[layer]
            self.worker.wait_for_layer_load(name)
            if compute:
                for request, blocks, computed, new in planned.scheduled:
                    self._compute_layer(layer, request.token_ids, blocks, computed, computed + new)
            self.worker.save_kv_layer(name, self.kv_caches[name])

    def prefill(
        self, request: Request, *, chunk: int | None = None, order: CallOrder = CallOrder()
    ) -> tuple[int, ...]:
        """Compute a whole prompt, in chunks, and end the request. Returns its blocks."""
        total = len(request.token_ids)
        blocks = self.allocate(total)
        self.scheduler.on_new_request(request)
        self.scheduler.update_state_after_alloc(request, (blocks,), 0)
        for start in range(0, total, chunk or total):
            self.step([(request, blocks, start, min(chunk or total, total - start))], order=order)
        self.scheduler.request_finished(request, (blocks,), RequestEnd.FINISHED)
        return blocks

    def load(
        self, request: Request, *, order: CallOrder = CallOrder()
    ) -> tuple[tuple[int, ...], int, WorkerOutput]:
        """Match, allocate, and run the step that loads. Returns (blocks, tokens loaded, report)."""
        num_loaded, is_async = self.matched(request)
        blocks = self.allocate(len(request.token_ids))
        self.scheduler.update_state_after_alloc(request, (blocks,), num_loaded)
        if is_async:
            return blocks, num_loaded, self.step([], order=order)
        rest = len(request.token_ids) - num_loaded
        return blocks, num_loaded, self.step([(request, blocks, num_loaded, rest)], order=order)


def kv_of(token_id: int, position: int, layer: int) -> Tensor:
    """What the KV of a token is: distinct for each (token, position, layer, head, element)."""
    import torch

    base = torch.arange(NUM_HEADS * HEAD_SIZE, dtype=torch.float32).view(NUM_HEADS, HEAD_SIZE)
    return base + 100.0 * layer + 0.25 * position + 1000.0 * token_id


def request_of(request_id: str, token_ids: Iterable[int], *, extra: bytes = b"") -> Request:
    """A request that is all prompt."""
    tokens = tuple(token_ids)
    return Request(request_id=request_id, token_ids=tokens, num_prompt_tokens=len(tokens), extra=extra)
