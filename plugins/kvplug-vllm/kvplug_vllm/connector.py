"""The connector class that vLLM constructs in its scheduler and in each of its workers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
import vllm

from kvplug import (
    ConfigError,
    ConnectorInfo,
    Registry,
    UnsupportedError,
    build_connector,
)
from kvplug.engine import Role, SchedulerConnector, WorkerConnector
from kvplug_vllm.logs import join_vllm
from kvplug_vllm.metadata import KvplugConnectorMetadata, KvplugStats, KvplugWorkerMetadata
from kvplug_vllm.metrics import KvplugPromMetrics
from kvplug_vllm.plugin import register
from kvplug_vllm.ranks import log_address_of
from kvplug_vllm.releases.base import (
    FAILS_BY_REQUEST,
    SUPPORTS_GROUPS,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    require_implemented,
    supported,
    transfer_results,
    unknown_names,
)
from kvplug_vllm.releases.cache import layout_to_require
from kvplug_vllm.scheduler import KvplugConnectorScheduler
from kvplug_vllm.translate import (
    cache_of,
    can_rewind,
    config_of,
    config_of_extra,
    frees_early,
    model_of,
    parallelism_of,
    replays_steps,
)
from kvplug_vllm.worker import KvplugConnectorWorker

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


class KvplugConnector(KVConnectorBase_V1, *SUPPORTS_GROUPS):  # type: ignore[misc]  # by the release
    """Adapts the kvplug connector that the extra config names to vLLM's connector API.

    It only translates. The connector decides which tokens it loads, from where, how and when; vLLM decides
    what happens after a failed load (``kv_load_failure_policy``).

    Raises (the constructor):
        kvplug.ConfigError: the configuration is wrong; lists every fault.
        kvplug.UnsupportedError: the model's KV cannot be moved; the message says why.
        kvplug.KvplugError: any other error of ``kvplug.build_connector``.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if more := unknown_names(KVConnectorBase_V1):
            _log.warning(
                "the connector API of vLLM %s has %s, which kvplug-vllm does not know; %s",
                vllm.__version__,
                ", ".join(more),
                supported(),
            )
        registry = Registry.from_env()
        join_vllm(registry)
        cache = cache_of(vllm_config, kv_cache_config)
        side: Literal["scheduler", "worker"] = "scheduler" if role is KVConnectorRole.SCHEDULER else "worker"
        config = config_of(vllm_config)
        frees = frees_early(cache)
        if frees and not (FAILS_BY_REQUEST and ConnectorInfo(config, registry).connector_class.supports_hma):
            raise UnsupportedError(
                f"connector {config.connector!r} supports one KV cache group that keeps its blocks, but this"
                f" model has {len(cache.groups)} groups, or frees blocks outside a window: start this server"
                " with --disable-hybrid-kv-cache-manager"
            )
        in_step = can_rewind(vllm_config) and not frees and not replays_steps(vllm_config)
        if side == "scheduler":
            log_address_of(vllm_config.parallel_config.data_parallel_index, config)
        which = f"{config.connector} at {config.host}, {config.port}"  # for a MultiConnector
        built = build_connector(
            config,
            side,
            model=model_of(vllm_config, kv_cache_config),
            cache=cache,
            parallelism=parallelism_of(vllm_config),
            loads_in_background=not in_step,
            start=f"{config.engine_id} {vllm_config.instance_id}",
            registry=registry,
        )
        if isinstance(built, WorkerConnector):
            self._worker = KvplugConnectorWorker(built, cache, which=which, fails_requests=frees)
        else:
            self._scheduler = KvplugConnectorScheduler(
                built,
                which=which,
                tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
                loads_in_step=in_step,
                groups=cache.groups,
                fails_requests=frees,
            )
        self._connector: SchedulerConnector | WorkerConnector = built

    # -- without an instance -------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return layout_to_require(ConnectorInfo(config_of(vllm_config)).required_layout)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # vLLM does not pass the role here. When it replays whole steps, every load runs in the background, so
        # only a producer's saves can need the hooks.
        return ConnectorInfo(
            attrs.evolve(config_of_extra(extra_config), role=Role.PRODUCER)
        ).needs_layer_hooks

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return False  # cache_of refuses it if vLLM does not ask

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvplugStats:
        return KvplugStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvplugPromMetrics:
        return KvplugPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- both sides ----------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvplugStats | None:
        side = self._scheduler if self.role is KVConnectorRole.SCHEDULER else self._worker
        return side.get_stats()

    def shutdown(self) -> None:
        self._connector.shutdown()

    # -- worker side, at start -----------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.get_handshake_metadata()

    # -- worker side, each step ----------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._worker.handle_preemptions(_ours(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.bind(_ours(connector_metadata))

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.clear()

    def has_connector_metadata(self) -> bool:
        return self._worker.connector.has_connector_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self._worker.get_finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, received = self.get_finished(finished_req_ids)
        return transfer_results(sent, received, self._worker.failed_among(received))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> KvplugWorkerMetadata | None:
        return self._worker.build_worker_metadata()

    # -- scheduler side ------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return self._scheduler.connector.requires_kv_delivery

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._scheduler.set_handshake_metadata({(0, rank): each for rank, each in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.set_handshake_metadata(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KvplugConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        return self._scheduler.get_hit_sources(request, num_external_tokens)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.connector.has_pending_push_work()

    def reset_cache(self) -> bool:
        return self._scheduler.reset_cache()


def _ours(metadata: KVConnectorMetadata) -> KvplugConnectorMetadata:
    if not isinstance(metadata, KvplugConnectorMetadata):
        raise ConfigError(
            f"this step's metadata is a {type(metadata).__name__}: the scheduler and the worker have"
            " different connectors"
        )
    return metadata


require_implemented(KvplugConnector)
register()
