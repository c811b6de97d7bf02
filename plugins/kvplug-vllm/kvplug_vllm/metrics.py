"""kvplug's metrics among vLLM's Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvplug import ConnectorInfo
from kvplug_vllm.translate import config_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KvplugPromMetrics(KVConnectorPromMetrics):
    """The configured connector's metrics, under vLLM's labels and in vLLM's registry."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._sinks = ConnectorInfo(config_of(vllm_config)).connector_class.build_prom_metrics(
            labelnames,
            {index: [str(value) for value in values] for index, values in per_engine_labelvalues.items()},
            counter=metric_types[prometheus_client.Counter],
            histogram=metric_types[prometheus_client.Histogram],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if transfer_stats_data:
            self._sinks[engine_idx].emit(transfer_stats_data, {})
