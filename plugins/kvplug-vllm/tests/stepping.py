"""vLLM's own scheduler and KvplugConnector's two sides around connectors of the test: no model, no engine.

A test decides in which order steps are planned, run and reported, as vLLM does where several are in flight.
What crosses processes in vLLM is copied here too.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from kvplug.engine import (
    NO_BLOCK,
    BlockIds,
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
    from vllm.config import CUDAGraphMode, KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
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
PROMPT, OTHER_PROMPT = list(range(1, 101)), list(range(5001, 5101))
"""Three whole blocks each, and four tokens more."""


class Decides(SchedulerConnector):
    """Offers and keeps what the test says, and records its calls."""

    def __init__(self) -> None:
        self.offers: dict[str, int] = {}
        """Tokens from the prompt's first on, by request, until they are loaded."""
        self.in_background = self.keeps = False
        self.tables: dict[str, BlockIds] = {}
        """Of requests that load."""
        self.asked: list[tuple[str, int]] = []
        """Requests, and how many of their tokens vLLM had."""
        self.allocated: list[tuple[str, int]] = []
        """Requests, and how many of their tokens are loaded."""
        self.reports: list[WorkerOutput] = []
        self.ended: dict[str, RequestEnd] = {}
        self.metadata: dict[int, Plain] | None = None
        self._loads: dict[str, tuple[int, ...]] = {}

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Plain]) -> None:
        self.metadata = dict(metadata)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        new = self.offers.get(request.request_id, 0) - num_computed_tokens
        return (new, self.in_background) if new > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self.allocated.append((request.request_id, num_external_tokens))
        if num_external_tokens:
            del self.offers[request.request_id]
            start = dict(self.asked)[request.request_id]
            self.tables[request.request_id] = block_ids
            blocks = slice(start // BLOCK, (start + num_external_tokens) // BLOCK)
            self._loads[request.request_id] = tuple(
                block for table in block_ids for block in table[blocks] if block != NO_BLOCK
            )

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        loads, self._loads = self._loads, {}
        return {"loads": loads, "in background": self.in_background}

    def update_connector_output(self, output: WorkerOutput) -> None:
        self.reports.append(output)

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        self.ended[request.request_id] = end
        return self.keeps, None

    def shutdown(self) -> None:
        pass

    @property
    def sent(self) -> list[str]:
        """Requests reported as sent, in their order."""
        return [name for report in self.reports for name in report.finished_sending]

    @property
    def received(self) -> list[str]:
        return [name for report in self.reports for name in report.finished_recving]


class Moves(WorkerConnector):
    """Ends its loads at once, and names and fails what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        """Of the last step."""
        self.fails: set[str] = set()
        """Requests whose loads fail."""
        self.sent: set[str] = set()
        """To be named in the next step."""
        self.received: set[str] = set()
        self.is_slow = False
        """No load ends before the test names its request as received."""
        self.handshake: Plain = None
        self.failed: frozenset[int] = frozenset()

    def register_kv_caches(self, kv_caches: Any) -> None:
        pass

    def get_handshake_metadata(self) -> Plain:
        return self.handshake

    def bind_connector_metadata(self, metadata: Plain) -> None:
        super().bind_connector_metadata(metadata)
        self.calls = ["bind"]

    def start_load_kv(self) -> None:
        self.calls.append("start")
        assert isinstance(self._metadata, Mapping)
        for request_id, blocks in {} if self.is_slow else self._metadata["loads"].items():
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


class Stepping:
    """A scheduler and its workers without a model; each prompt's next token is the test's."""

    def __init__(
        self,
        model: str,
        policy: str,
        ports: Sequence[int],
        *,
        num_workers: int = 1,
        plans_ahead: bool = False,
        replays_steps: bool = False,
        window: int | None = None,
    ) -> None:
        """
        Args:
            ports: those of the children of a MultiConnector.
            window: of the first layer, which is then in a KV cache group of its own.
        """
        self.decided: dict[int, Decides] = {}
        """The connectors in the scheduler, by port."""
        self.moved: dict[int, list[Moves]] = defaultdict(list)
        """Those in the workers."""
        transfer = transfer_config()
        if ports:
            children = [transfer_config(port=port) for port in ports]
            transfer |= {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {"connectors": children},
            }
        num_blocks = 64
        cache = cache_config(num_blocks, window)
        self.config = EngineArgs(
            model=model,
            kv_transfer_config=KVTransferConfig(**transfer, kv_load_failure_policy=policy),
            enforce_eager=True,
            max_num_seqs=4,
            max_model_len=2048,
            dtype="float32",
            block_size=BLOCK,
            distributed_executor_backend="uni",
        ).create_engine_config()
        # Which vLLM's CPU platform switches off:
        self.config.scheduler_config.async_scheduling = plans_ahead
        mode = CUDAGraphMode.FULL if replays_steps else CUDAGraphMode.NONE
        self.config.compilation_config.cudagraph_mode = mode
        self.config.cache_config.num_gpu_blocks = num_blocks
        with patch.object(kvplug_vllm.connector, "build_connector", self._build):
            self.scheduler: Any = (AsyncScheduler if plans_ahead else Scheduler)(
                vllm_config=self.config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=BLOCK,
                log_stats=True,
            )
            self.workers: list[Any] = [
                KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cache)
                for _ in range(num_workers)
            ]
        for worker in self.workers:
            worker.register_kv_caches({name: torch.zeros(num_blocks, 3, BLOCK, 128) for name in LAYERS})
        self._aggregator = KVOutputAggregator(num_workers)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def _build(self, config: Any, side: str, *, loads_in_background: bool, **_: Any) -> Any:
        self.loads_in_background = loads_in_background
        if side == "scheduler":
            return self.decided.setdefault(config.port, Decides())
        self.moved[config.port].append(Moves())
        return self.moved[config.port][-1]

    @property
    def decides(self) -> Decides:
        (only,) = self.decided.values()
        return only

    @property
    def moves(self) -> Moves:
        ((only,),) = self.moved.values()
        return only

    @property
    def connector(self) -> Any:
        """The one in the scheduler."""
        return self.scheduler.connector

    @property
    def worker(self) -> Any:
        (only,) = self.workers
        return only

    @property
    def requests(self) -> list[str]:
        """Those that vLLM knows."""
        return list(self.scheduler.requests)

    @property
    def num_used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def add(
        self,
        request_id: str,
        tokens: Sequence[int] = PROMPT,
        *,
        offers: int = 0,
        fails: bool = False,
        max_tokens: int = 8,
        prompt_logprobs: int | None = None,
        **more: Any,
    ) -> None:
        """Add a request. The only connector ``offers`` so many of its tokens, and maybe ``fails`` to load."""
        if offers:
            self.decides.offers[request_id] = offers
        if fails:
            self.moves.fails.add(request_id)
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

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def plan(self) -> Any:
        return self.scheduler.schedule()

    def run(self, plan: Any, token: int = 7) -> Any:
        """Run a step: the connectors' calls, and a token for each computed request. Returns the report."""
        outputs = [copy.deepcopy(self._run(each, plan, token)) for each in self.workers]
        return outputs[0] if len(outputs) == 1 else self._aggregator.aggregate(outputs)

    def _run(self, worker: Any, plan: Any, token: int) -> Any:
        plan = dataclasses.replace(plan, kv_connector_metadata=copy.deepcopy(plan.kv_connector_metadata))
        with patch.object(transfer_state, "_KV_CONNECTOR_AGENT", worker):
            worker.handle_preemptions(plan.kv_connector_metadata)
            with (
                set_forward_context(None, self.config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(plan) as output,
            ):
                if plan.total_num_scheduled_tokens and worker.has_connector_metadata():
                    for name in LAYERS:
                        worker.wait_for_layer_load(name)
                        worker.save_kv_layer(name, torch.empty(0), None)
        if not plan.total_num_scheduled_tokens:
            return ModelRunnerOutput.with_kv_conn_output_only(output)
        computed, cached = self.computed(plan), plan.scheduled_cached_reqs
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
        """What vLLM sends to the requests after the step: request to new tokens."""
        sent = self.scheduler.update_from_output(plan, output)
        return {
            one.request_id: list(one.new_token_ids) for outputs in sent.values() for one in outputs.outputs
        }

    def finish(self, plan: Any, token: int = 7) -> dict[str, list[int]]:
        """Run a planned step, and report it."""
        return self.report(plan, self.run(plan, token))

    def step(self, token: int = 7) -> dict[str, list[int]]:
        return self.finish(self.plan(), token)

    def steps(self, times: int) -> list[dict[str, list[int]]]:
        return [self.step() for _ in range(times)]

    def computed(self, plan: Any) -> dict[str, int]:
        """Tokens that the step does not compute, of the requests that are new in it."""
        return {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}


def transfer_config(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvplugConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connector": "lookup", **extra},
    }


def cache_config(num_blocks: int, window: int | None) -> KVCacheConfig:
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
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups, **declared)
