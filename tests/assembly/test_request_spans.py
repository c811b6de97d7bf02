"""What is known of each request of any connector, from the calls of its engine alone."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from kvplug import KvplugError
from kvplug.assembly.request_spans import RequestSpans
from kvplug.engine import RequestEnd, SpanLog
from kvplug.metrics.stats import TransferStats
from kvplug_testing.engine import request_of


def test_a_wait_ends_when_an_engine_runs_the_request_without_another_query() -> None:
    connector = Mock()
    connector.get_num_new_matched_tokens.return_value = None, False
    connector.get_status.return_value = {}
    stats, request = TransferStats(), request_of("a", range(40))
    RequestSpans(connector, SpanLog(), stats)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, ((1, 2, 3),), 0)
    assert connector.get_status() == {"waiting": []}
    assert stats.snapshot()["ops"]["wait"]["count"] == 1


def test_an_engine_that_loads_more_tokens_than_were_promised_is_refused() -> None:
    connector = Mock()
    connector.get_hit_sources.return_value = {}
    connector.get_num_new_matched_tokens.return_value = 32, False
    request = request_of("a", range(40))
    RequestSpans(connector, SpanLog(), TransferStats())
    allocate = connector.update_state_after_alloc
    connector.get_num_new_matched_tokens(request, 0)
    with pytest.raises(KvplugError, match=r"got 33 external tokens of request 'a', but .* promised 32"):
        allocate(request, ((1, 2, 3),), 33)
    connector.get_num_new_matched_tokens(request, 0)
    allocate(request, ((1, 2, 3),), 16)
    allocate(request, ((1, 2, 3),), 0)  # again, after a load in the background
    with pytest.raises(KvplugError, match="promised 0"):
        allocate(request, ((1, 2, 3),), 16)


def test_a_request_whose_answer_is_not_yet_is_shown_as_waiting_and_its_wait_is_counted() -> None:
    answers = [(None, False), (None, False), (16, False), (16, False), (None, False), (0, False)]
    connector = Mock()
    connector.get_num_new_matched_tokens.side_effect = answers
    connector.get_status.return_value = {"num_held": 1}
    connector.request_finished.return_value = (False, None)
    spans, stats, request = SpanLog(), TransferStats(), request_of("a", range(40))
    RequestSpans(connector, spans, stats)

    def waiting() -> list[Any]:
        status = connector.get_status()
        assert status["num_held"] == 1
        return [each["request_id"] for each in status["waiting"] if each["seconds"] >= 0]

    found = []
    for answer in answers:
        assert connector.get_num_new_matched_tokens(request, 0) == answer
        found.append((waiting(), stats.snapshot()["ops"].get("wait", {}).get("count", 0)))
    assert found == [(["a"], 0), (["a"], 0), ([], 1), ([], 1), (["a"], 1), ([], 2)]
    ids = {trace_id for _, trace_id in stats.snapshot()["ops"]["wait"]["samples"]}
    assert ids == {spans.trace_id_of("a")}
    connector.request_finished(request, ((),), RequestEnd.FINISHED)
    names = [span.name for span in spans.of_request("a")]
    assert (names.count("wait"), names.count("match")) == (2, 1)
