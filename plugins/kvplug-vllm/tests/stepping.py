"""vLLM's own scheduler and KvplugConnector's two sides around a connector of the test's: no model, no engine.

A test decides in which order steps are planned, run and reported, as vLLM does where several are in flight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvplug.engine import (
    NO_BLOCK,
    BlockIds,
    CacheEvent,
    Plain,
    Request,
    RequestEnd,
    SchedulerConnector,
    SchedulerOutput,
    WorkerConnector,
    WorkerOutput,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.distributed.kv_transfer.kv_transfer_state as transfer_state
    from vllm import SamplingParams
    from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as VllmRequest, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    import kvplug_vllm.connector
    from kvplug_vllm.releases.cache import declares_layout

BLOCK = 32
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
"""Enough of the model's thirty."""


class Decides(SchedulerConnector):
    """Offers what it is told to, keeps what it is told to keep, and remembers what it heard."""

    def __init__(self) -> None:
        self.offers: dict[str, int] = {}
        """Tokens from the prompt's first on, by request."""
        self.in_background = False
        self.keeps = False
        self._starts: dict[str, int] = {}
        self._loads: dict[str, tuple[int, ...]] = {}
        self.tables: dict[str, BlockIds] = {}
        """Of requests that load."""
        self.asked: list[tuple[str, int]] = []
        """Requests, and how many of their tokens vLLM had."""
        self.allocated: list[tuple[str, int]] = []
        """Requests, and how many of their tokens are loaded."""
        self.heard: list[WorkerOutput] = []
        self.ended: dict[str, RequestEnd] = {}
        self.metadata: Mapping[int, Plain] | None = None

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Plain]) -> None:
        self.metadata = dict(metadata)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        self._starts[request.request_id] = num_computed_tokens
        new = self.offers.get(request.request_id, 0) - num_computed_tokens
        return (new, self.in_background) if new > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self.allocated.append((request.request_id, num_external_tokens))
        if num_external_tokens:
            del self.offers[request.request_id]  # it offers the same once
            start = self._starts[request.request_id]
            self.tables[request.request_id] = block_ids
            self._loads[request.request_id] = tuple(
                block
                for table in block_ids
                for block in table[start // BLOCK : (start + num_external_tokens) // BLOCK]
                if block != NO_BLOCK
            )

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        loads, self._loads = self._loads, {}
        return {"step": output.step, "loads": loads, "in background": self.in_background}

    def update_connector_output(self, output: WorkerOutput) -> None:
        self.heard.append(output)

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        self.ended[request.request_id] = end
        return self.keeps, None

    def shutdown(self) -> None:
        pass


class Moves(WorkerConnector):
    """Loads whatever it is told to, at once; what it is told will fail, fails."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fails: set[str] = set()
        """Requests."""
        self.sent: set[str] = set()
        """To be named in the next step."""
        self.received: set[str] = set()
        self.says: Plain = None
        """At start."""
        self.events: list[CacheEvent] = []
        self.failed: frozenset[int] = frozenset()

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.caches = dict(kv_caches)

    def get_handshake_metadata(self) -> Plain:
        return self.says

    def bind_connector_metadata(self, metadata: Plain) -> None:
        super().bind_connector_metadata(metadata)
        self.calls = ["bind"]

    def start_load_kv(self) -> None:
        self.calls.append("start")
        assert isinstance(self._metadata, Mapping)
        for request_id, blocks in self._metadata["loads"].items():
            if request_id in self.fails:
                self.failed |= frozenset(blocks)
            if self._metadata["in background"]:
                self.received.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append("layer")

    def save_kv_layer(self, layer_name: str, kv_layer: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self.calls.append("save")

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        sent, received = frozenset(self.sent), frozenset(self.received)
        self.sent, self.received = set(), set()
        return sent, received

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        failed, self.failed = self.failed, frozenset()
        return failed

    def shutdown(self) -> None:
        pass


class Made:
    """What is stepped, and the connectors in it: one, or children of a MultiConnector."""

    def __init__(self, model: str, policy: str, ports: Sequence[int], **more: Any) -> None:
        """``ports``: of the children, by which they are told apart."""
        self._schedulers: dict[int, Decides] = {}
        self._workers: dict[int, Moves] = {}
        transfer = transfer_config()
        if ports:
            children = [transfer_config(port=port) for port in ports]
            transfer |= {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {"connectors": children},
            }
        self.engine = Stepping(model, {**transfer, "kv_load_failure_policy": policy}, self._build, **more)

    def _build(self, config: Any, side: str, *, loads_in_background: bool, **_: Any) -> Any:
        self.loads_in_background = loads_in_background
        if side == "scheduler":
            return self._schedulers.setdefault(config.port, Decides())
        return self._workers.setdefault(config.port, Moves())

    @property
    def decides(self) -> Decides:
        (only,) = self._schedulers.values()
        return only

    @property
    def moves(self) -> Moves:
        (only,) = self._workers.values()
        return only

    def child(self, port: int) -> tuple[Decides, Moves]:
        return self._schedulers[port], self._workers[port]


class Stepping:
    """A scheduler and one worker without a model; each prompt's next token is the test's."""

    def __init__(
        self,
        model: str,
        transfer: Mapping[str, Any],
        build: Callable[..., Any],
        *,
        plans_ahead: bool = False,
        num_blocks: int = 64,
        window: int | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            build: stands where ``kvplug.build_connector`` does, for both sides.
            window: of the first layer, which is then in a KV cache group of its own.
        """
        self.config = vllm_config(model, transfer, plans_ahead=plans_ahead, **settings)
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.cache = cache_config(num_blocks, window)
        before = kvplug_vllm.connector.build_connector
        kvplug_vllm.connector.build_connector = build
        try:
            kind = AsyncScheduler if plans_ahead else Scheduler
            self.scheduler: Any = kind(
                vllm_config=self.config,
                kv_cache_config=self.cache,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=BLOCK,
                log_stats=True,
            )
            self.worker: Any = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, self.cache
            )
        finally:
            kvplug_vllm.connector.build_connector = before
        shape = (num_blocks, 3, BLOCK, 128)
        self.worker.register_kv_caches({name: torch.zeros(shape) for name in LAYERS})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def add(
        self,
        request_id: str,
        tokens: list[int],
        *,
        max_tokens: int = 8,
        prompt_logprobs: int | None = None,
        **more: Any,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, prompt_logprobs=prompt_logprobs
        )
        self.scheduler.add_request(
            VllmRequest(
                request_id=request_id,
                prompt_token_ids=list(tokens),
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._hasher,
                **more,
            )
        )

    @property
    def num_used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def plan(self) -> Any:
        return self.scheduler.schedule()

    def run(self, plan: Any, token: int = 7) -> Any:
        """As a model runner: the connector's calls of one step, and a token for each computed request."""
        transfer_state._KV_CONNECTOR_AGENT = self.worker
        try:
            self.worker.handle_preemptions(plan.kv_connector_metadata)
            with (
                set_forward_context(None, self.config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(plan) as output,
            ):
                if plan.total_num_scheduled_tokens and self.worker.has_connector_metadata():
                    for name in LAYERS:
                        self.worker.wait_for_layer_load(name)
                        self.worker.save_kv_layer(name, torch.empty(0), None)
        finally:
            transfer_state._KV_CONNECTOR_AGENT = None
        if not plan.total_num_scheduled_tokens:
            return ModelRunnerOutput.with_kv_conn_output_only(output)
        computed = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        cached = plan.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[
                [token] if self._is_whole(name, computed[name] + plan.num_scheduled_tokens[name]) else []
                for name in names
            ],
            kv_connector_output=output,
        )

    def _is_whole(self, name: str, num_computed: int) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and num_computed >= request.num_prompt_tokens

    def report(self, plan: Any, output: Any) -> dict[str, list[int]]:
        """What vLLM tells the requests after the step: request to new tokens."""
        told = self.scheduler.update_from_output(plan, output)
        return {
            one.request_id: list(one.new_token_ids) for outputs in told.values() for one in outputs.outputs
        }

    def step(self, token: int = 7) -> dict[str, list[int]]:
        plan = self.plan()
        return self.report(plan, self.run(plan, token))

    def computed(self, plan: Any) -> dict[str, int]:
        """Tokens that the step does not compute, of the requests that are new in it."""
        return {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}


def transfer_config(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvplugConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connector": "lookup", **extra},
    }


def vllm_config(
    model: str,
    transfer: Mapping[str, Any],
    *,
    plans_ahead: bool = False,
    replays_steps: bool = False,
    **settings: Any,
) -> VllmConfig:
    usual = {
        "enforce_eager": True,
        "max_num_seqs": 4,
        "max_model_len": 2048,
        "dtype": "float32",
        "block_size": BLOCK,
        "distributed_executor_backend": "uni",
    }
    made = EngineArgs(
        model=model, kv_transfer_config=KVTransferConfig(**transfer), **(usual | settings)
    ).create_engine_config()
    # Which vLLM's CPU platform switches off:
    made.scheduler_config.async_scheduling = plans_ahead
    made.compilation_config.cudagraph_mode = CUDAGraphMode.FULL if replays_steps else CUDAGraphMode.NONE
    return made


def cache_config(num_blocks: int, window: int | None = None) -> KVCacheConfig:
    sizes: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 3,
        "head_size": 64,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(list(LAYERS), FullAttentionSpec(**sizes))]
    if window is not None:
        groups = [
            KVCacheGroupSpec([LAYERS[0]], SlidingWindowSpec(**sizes, sliding_window=window)),
            KVCacheGroupSpec([LAYERS[1]], FullAttentionSpec(**sizes)),
        ]
    declared = {"kv_cache_layout": "LBHNC"} if declares_layout() else {}
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        **declared,
    )
