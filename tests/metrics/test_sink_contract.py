"""The core's sinks are judged by the kit."""

from __future__ import annotations

import prometheus_client

from kvplug_testing import SinkContract


class TestLog(SinkContract):
    sink = "log"


class TestPrometheus(SinkContract):
    sink = "prometheus"

    def counted(self, op: str) -> float:
        return sum(
            sample.value
            for metric in prometheus_client.REGISTRY.collect()
            for sample in metric.samples
            if sample.name == "kvplug_operations_total" and sample.labels["op"] == op
        )
