"""A model-free engine: enough of one to drive both sides of the connector in the documented order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvplug.build import build_connector
from kvplug.config import Config
from kvplug.connector.values import (
    AttentionMetadata,
    CacheGroup,
    ForwardContext,
    KVCacheConfig,
    Parallelism,
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


def layout_of(axes: str, block_size: int, num_blocks: int) -> KVLayout:
    return KVLayout(axes, {"K": 2, "B": num_blocks, "T": block_size, "H": NUM_HEADS, "D": HEAD_SIZE})


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
        model: ModelInfo = MODEL,
        seed: int = 0,
        **build: Any,
    ) -> None:
        self.block_size = block_size
        self.layer_names = tuple(f"layers.{index}" for index in range(NUM_LAYERS))
        self.layout = layout_of(axes, block_size, num_blocks)
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
        axes = self.layout.axes.replace("KD", "D") if self.layout.is_packed else self.layout.axes

        def pick(k: int) -> Any:
            return self.kv_caches[layer_name][tuple({**at, "K": k}.get(axis, slice(None)) for axis in axes)]

        if self.layout.is_packed:
            both = pick(0)
            return both[..., :HEAD_SIZE], both[..., HEAD_SIZE:]
        return pick(0), pick(1)

    def compute(self, token_ids: tuple[int, ...], block_ids: tuple[int, ...], start: int, end: int) -> None:
        for layer, name in enumerate(self.layer_names):
            for position in range(start, end):
                key, value = self.slot(name, block_ids, position)
                key.copy_(kv_of(token_ids[position], position, layer))
                value.copy_(-kv_of(token_ids[position], position, layer))

    def is_right(self, token_ids: tuple[int, ...], block_ids: tuple[int, ...], end: int) -> bool:
        import torch

        for layer, name in enumerate(self.layer_names):
            for position in range(end):
                key, value = self.slot(name, block_ids, position)
                expected = kv_of(token_ids[position], position, layer)
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
        scheduled: list[tuple[Request, tuple[int, ...], int, int]],
        *,
        compute: bool = True,
        preempted: frozenset[str] = frozenset(),
    ) -> WorkerOutput:
        """One engine step over (request, block_ids, num_computed, num_scheduled)."""
        self.step_number += 1
        output = SchedulerOutput(
            step=self.step_number,
            scheduled=tuple(
                ScheduledRequest(
                    request_id=request.request_id,
                    block_ids=(blocks,),
                    num_computed_tokens=computed,
                    num_scheduled_tokens=new,
                )
                for request, blocks, computed, new in scheduled
            ),
            preempted_request_ids=preempted,
        )
        metadata = self.scheduler.build_connector_meta(output)
        if preempted:
            self.worker.handle_preemptions(preempted)
        self.worker.bind_connector_metadata(metadata)
        attention = AttentionMetadata(
            request_ids=tuple(request.request_id for request, *_ in scheduled),
            query_lens=tuple(new for *_, new in scheduled),
            seq_lens=tuple(computed + new for *_, computed, new in scheduled),
            block_tables=tuple(blocks for _, blocks, *_ in scheduled),
            slot_mapping=(),
        )
        self.worker.start_load_kv(ForwardContext(step=self.step_number, attention=(attention,)))
        for name in self.layer_names:
            self.worker.wait_for_layer_load(name)
        if compute:
            for request, blocks, computed, new in scheduled:
                self.compute(request.token_ids, blocks, computed, computed + new)
        for name in self.layer_names:
            self.worker.save_kv_layer(name, self.kv_caches[name], attention)
        self.worker.wait_for_save()
        sending, receiving = self.worker.get_finished(frozenset())
        report = WorkerOutput(
            finished_sending=sending,
            finished_recving=receiving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            worker_metadata=type(self.worker).aggregate_worker_metadata(
                [self.worker.build_worker_metadata()]
            ),
        )
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(report)
        return report

    def prefill(self, request: Request, *, chunk: int | None = None) -> tuple[int, ...]:
        """Compute a whole prompt, in chunks, and end the request. Returns its blocks."""
        total = len(request.token_ids)
        blocks = self.allocate(total)
        self.scheduler.on_new_request(request)
        self.scheduler.update_state_after_alloc(request, (blocks,), 0)
        for start in range(0, total, chunk or total):
            self.step([(request, blocks, start, min(chunk or total, total - start))])
        self.scheduler.request_finished(request, (blocks,), RequestEnd.FINISHED)
        return blocks

    def load(self, request: Request) -> tuple[tuple[int, ...], int, WorkerOutput]:
        """Match, allocate, and run the step that loads. Returns (blocks, tokens loaded, report)."""
        num_loaded, is_async = self.matched(request)
        blocks = self.allocate(len(request.token_ids))
        self.scheduler.update_state_after_alloc(request, (blocks,), num_loaded)
        if is_async:
            return blocks, num_loaded, self.step([])
        rest = len(request.token_ids) - num_loaded
        return blocks, num_loaded, self.step([(request, blocks, num_loaded, rest)])


def kv_of(token_id: int, position: int, layer: int) -> Tensor:
    """What the KV of a token is: distinct for each (token, position, layer, head, element)."""
    import torch

    base = torch.arange(NUM_HEADS * HEAD_SIZE, dtype=torch.float32).view(NUM_HEADS, HEAD_SIZE)
    return base + 100.0 * layer + 0.25 * position + 1000.0 * token_id


def request_of(request_id: str, token_ids: Iterable[int], *, extra: bytes = b"") -> Request:
    """A request that is all prompt."""
    tokens = tuple(token_ids)
    return Request(request_id=request_id, token_ids=tokens, num_prompt_tokens=len(tokens), extra=extra)
