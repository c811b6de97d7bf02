"""Spans: what a log of them keeps, and what a collector of OpenTelemetry receives."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from kvplug import Config, ConfigError
from kvplug.metrics import spans as module
from kvplug.metrics.spans import SpanContext, SpanLog
from kvplug.net.wire import encode, to_plain

pytestmark = pytest.mark.timeout(60)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"00-{TRACE}-{SPAN}-01", SpanContext(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-00", SpanContext(TRACE, SPAN, False)),
        (f"01-{TRACE}-{SPAN}-03-more", SpanContext(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"00-{TRACE}-{SPAN}-01-", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_a_traceparent_is_read_as_w3c_specifies(text: object, found: SpanContext | None) -> None:
    assert SpanContext.parse(text) == found
    if found is not None:
        assert SpanContext.parse(str(found)) == found


def test_parts_are_in_the_trace_of_their_parent() -> None:
    log = SpanLog()
    root = log.begin("a", SpanContext(TRACE, SPAN, False))
    begun = time.perf_counter() - 0.5
    part = log.record("load", "a", begun, begun + 0.25, parent=log.traceparent_of("a"), reason="timeout")
    log.record_layers("a", begun, [(n, begun + n / 100) for n in range(1, 31)], part, is_verified=True)
    load, *transfers = log.of_request("a")
    assert (load.context, load.parent_id, load.reason) == (part, root.span_id, "timeout")
    assert load.context.trace_id == TRACE and not load.context.is_sampled
    assert load.duration_ns == 250_000_000
    assert abs(load.start_ns - (time.time_ns() - 500_000_000)) < 10e9
    layers = [(s.attributes["first_layer"], s.attributes["last_layer"]) for s in transfers]
    assert layers[0][0] == 0 and layers[-1][1] == 29 and len(layers) == 4
    assert all(end + 1 == begin for (_, end), (begin, _) in itertools.pairwise(layers))
    log.end("a")
    assert not log.traceparent_of("a")
    assert log.record("load", "b", begun, parent="wrong").trace_id != TRACE


def test_a_log_is_bounded_and_counts_what_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SPANS", 3)
    log = SpanLog()
    for number in range(5):
        log.record(f"{number}", "a", 0.0)
    found, position = log.after(0)
    assert [span.name for span in found] == ["2", "3", "4"]
    assert position == 5
    assert log.after(4)[0] == found[-1:]
    assert log.after(position) == ([], 5)


def test_a_long_id_is_found_and_takes_little_memory() -> None:
    log, long = SpanLog(), "cmpl-" + "x" * 60_000
    root = log.begin(long)
    log.record("load", long, 0.0, parent=log.traceparent_of(long))
    for name in (long, long[:20]):
        (span,) = log.of_request(name)
        assert span.context.trace_id == root.trace_id
        assert len(span.request_id) < 1000


def test_an_id_that_is_not_text_is_found_and_can_be_sent() -> None:
    log = SpanLog()
    log.record("load", "cmpl-\ud800-1", 0.0)
    (span,) = log.of_request("cmpl-\ud800")
    assert span.request_id == "cmpl-?-1"
    assert encode(to_plain(span))


# -- OpenTelemetry -------------------------------------------------------------------------------------


def test_a_collector_receives_each_span_with_its_ids_times_and_attributes(collector: list[Any]) -> None:
    from kvplug.metrics.tracing import Tracing

    log = SpanLog()
    root = log.begin("a")
    tracing = Tracing(log, "otlp_proto_http", {"engine_id": "e1", "side": "scheduler"})
    begun = time.perf_counter()
    log.record("load", "a", begun, begun + 0.25, parent=root, reason="timeout", n=3)
    log.record("request", "a", begun, begun + 1, context=root)
    log.record("load", "b", begun, parent=f"00-{TRACE}-{SPAN}-00")  # its first process does not sample it
    tracing.close()
    (resource,) = [one for request in collector for one in request.resource_spans]
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert about["service.name"] == "decode" and about["zone"] == "a"
    assert about["service.instance.id"] == "e1" and about["kvplug.side"] == "scheduler"
    (scope,) = resource.scope_spans
    load, request = scope.spans
    assert scope.scope.name == "kvplug"
    assert (load.name, request.name) == ("kvplug.load", "kvplug.request")
    assert request.span_id.hex() == root.span_id and not request.parent_span_id
    assert load.parent_span_id == request.span_id
    assert load.trace_id == request.trace_id == bytes.fromhex(root.trace_id)
    assert load.end_time_unix_nano - load.start_time_unix_nano == 250_000_000
    given = {each.key: each.value.string_value or each.value.int_value for each in load.attributes}
    assert given == {"kvplug.request.id": "a", "kvplug.n": 3, "error.type": "timeout"}
    assert load.status.code == 2 and request.status.code == 0
    assert [log.of_request(name) for name in "ab"]  # what is exported is still in memory


def test_an_exporter_that_hangs_delays_the_end_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from kvplug.metrics import tracing as module
    from kvplug.metrics.tracing import Tracing

    class Hanging(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            released.wait(50)
            return SpanExportResult.SUCCESS

    monkeypatch.setattr(module, "_CLOSE_S", 0.2)
    released = threading.Event()
    log = SpanLog()
    tracing = Tracing(log, Hanging(), {})
    log.record("load", "a", 0.0)
    tracing.close()
    tracing.close()
    assert [record.message for record in caplog.records] == [
        "the exporter of traces hangs; the last spans are not exported"
    ]
    (left,) = [one for one in threading.enumerate() if one.name == "kvplug-tracing"]
    assert left.daemon, "the interpreter would wait for it"
    released.set()
    left.join(20)
    assert not left.is_alive()


def test_a_span_that_cannot_be_exported_is_logged_and_the_others_are_exported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from kvplug.metrics.tracing import Tracing

    log, exporter = SpanLog(), InMemorySpanExporter()
    tracing = Tracing(log, exporter, {})
    for _ in range(3):
        log.record("wrong", "a", 0.0, context=SpanContext("no", "digits"))
    log.record("load", "a", 0.0)
    tracing.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["kvplug.load"]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == "a span 'wrong' cannot be exported"


def test_an_exporter_that_is_not_installed_is_refused_by_name() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from kvplug.metrics.tracing import Tracing

    with pytest.raises(
        ConfigError, match=r"no installed package offers the exporter 'zipkin'; installed: .*console"
    ):
        Tracing(SpanLog(), "zipkin", {})
    with pytest.raises(ConfigError, match="tracing"):
        Config.from_dict({"tracing": "Not One"})
