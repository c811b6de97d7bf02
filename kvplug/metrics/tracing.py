"""Exports spans to OpenTelemetry. Needs its SDK (``pip install kvplug[otel]``).

Only the public API of ``opentelemetry`` is used, and none of its global state: an engine that traces itself
is not affected. The exporter is configured by its usual environment variables, such as
``OTEL_EXPORTER_OTLP_ENDPOINT`` and ``OTEL_SERVICE_NAME``.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import ConfigError
from kvplug.metrics.spans import Attribute, Span, SpanLog
from kvplug.net.threads import BackgroundThread

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 1.0
_CLOSE_S: Final = 5.0
_PREFIX: Final = "kvplug."
_GROUP: Final = "opentelemetry_traces_exporter"
"""The entry points in which packages of OpenTelemetry offer exporters, such as "otlp" and "console"."""


class Tracing:
    """Exports the spans of one side of a connector, from a thread of its own, every second."""

    def __init__(self, spans: SpanLog, exporter: str | SpanExporter, labels: Mapping[str, str]) -> None:
        """
        Args:
            exporter: the name of an installed exporter, or an exporter.
            labels: name the source of the spans, as for a sink of metrics.

        Raises:
            ConfigError: OpenTelemetry's SDK is not installed, no installed package offers the exporter, or
                it cannot be made.
        """
        self._spans = spans
        self._position = 0
        self._has_warned = False
        self._provider, self._ids = _provider_of(exporter, labels)
        self._tracer = self._provider.get_tracer("kvplug")
        self._closed = threading.Event()
        self._thread: BackgroundThread | None = BackgroundThread(
            self._run, name="kvplug-tracing", stop=self._closed.set
        )
        self._thread.start()

    def close(self) -> None:
        """Export the last spans, and end the thread. Idempotent. Waits for at most five seconds."""
        self._closed.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=_CLOSE_S)
            if thread.is_alive():
                _log.warning("the exporter of traces hangs; the last spans are not exported")

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(_INTERVAL_S)
            spans, position = self._spans.after(self._position)
            if (lost := position - self._position - len(spans)) > 0:
                _log.warning("%d spans were recorded faster than they were exported, and are lost", lost)
            self._position = position
            for span in spans:
                try:
                    self._export(span)
                except Exception:  # a plugin may record anything
                    level = logging.DEBUG if self._has_warned else logging.WARNING
                    _log.log(level, "a span %r cannot be exported", span.name, exc_info=True)
                    self._has_warned = True
        self._provider.shutdown()

    def _export(self, span: Span) -> None:
        from opentelemetry import trace

        parent = trace.SpanContext(
            int(span.context.trace_id, 16),
            int(span.parent_id or "1", 16),
            is_remote=False,
            trace_flags=trace.TraceFlags(span.context.is_sampled),
        )
        self._ids.next = span
        one = self._tracer.start_span(
            f"{_PREFIX}{span.name}",
            trace.set_span_in_context(trace.NonRecordingSpan(parent)) if span.parent_id else None,
            attributes=_prefixed({"request.id": span.request_id, **span.attributes}),
            start_time=span.start_ns,
        )
        if span.reason:
            one.set_attribute("error.type", span.reason)
            one.set_status(trace.StatusCode.ERROR)
        one.end(span.start_ns + span.duration_ns)


def _prefixed(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"{_PREFIX}{name}": value for name, value in attributes.items()}


def exporter_fault(name: str) -> str:
    """Return why an exporter cannot be used, or nothing if an installed package offers it."""
    known = sorted({found.name for found in importlib.metadata.entry_points(group=_GROUP)})
    if name in known:
        return ""
    return (
        f"tracing: no installed package offers the exporter {name!r}; installed:"
        f" {', '.join(known) or 'none'}. pip install 'kvplug[otel]' installs otlp_proto_http"
    )


def _provider_of(exporter: str | SpanExporter, labels: Mapping[str, str]) -> tuple[Any, Any]:
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator
    except ImportError as e:
        raise ConfigError("tracing: it needs OpenTelemetry's SDK: pip install 'kvplug[otel]'") from e

    class Ids(IdGenerator):  # type: ignore[misc]
        """Returns the ids of the next span, which kvplug chose when it was recorded."""

        next: Span

        def generate_trace_id(self) -> int:
            return int(self.next.context.trace_id, 16)

        def generate_span_id(self) -> int:
            return int(self.next.context.span_id, 16)

    if isinstance(exporter, str):
        exporter = _exporter_named(exporter)
    about: dict[str, Any] = {"service.name": "kvplug", "service.instance.id": labels.get("engine_id", "")}
    about |= _prefixed({name: value for name, value in labels.items() if name != "engine_id"})
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say takes precedence.
    resource = Resource.create(about).merge(OTELResourceDetector().detect())
    ids = Ids()
    provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, ids


def _exporter_named(name: str) -> SpanExporter:
    for found in importlib.metadata.entry_points(group=_GROUP, name=name):
        try:
            return found.load()()
        except Exception as e:
            raise ConfigError(f"tracing: the exporter {name!r} cannot be made: {e}") from e
    raise ConfigError(exporter_fault(name))
