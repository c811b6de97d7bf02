"""Recorded calls of engines can be read, and are written as they were."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from kvplug_testing import call_traces


def test_what_happens_to_requests_is_all_there() -> None:
    runs = call_traces.load("vllm-0.32").runs
    ends = {
        call.given["end"] for run in runs.values() for call in run.calls if call.method == "request_finished"
    }
    assert ends == {"finished", "aborted", "failed"}
    assert any(
        call.given["preempted"] for call in runs["preemption"].calls if call.method == "handle_preemptions"
    )
    assert any(call.answer for call in runs["abort while loading"].calls if call.method == "request_finished")
    chunks = [call for call in runs["save in chunks"].calls if call.method == "build_connector_meta"]
    starts = {computed for call in chunks for name, computed, _ in call.given["scheduled"] if name == "r2"}
    assert {start % 32 for start in starts} - {0}, "chunks end within blocks"


@pytest.mark.parametrize("name", call_traces.names())
def test_what_is_written_is_what_was_read(name: str) -> None:
    text = (resources.files(call_traces) / f"{name}.json").read_text(encoding="utf-8")
    assert call_traces.to_text(call_traces.load(name)) == text


def test_an_order_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(LookupError, match=r"'vllm-0\.1'.*vllm-0\.32"):
        call_traces.load("vllm-0.1")


def test_a_file_of_another_format_is_refused() -> None:
    text = json.dumps({"format": call_traces.FORMAT + 1, "engine": "x", "runs": []})
    with pytest.raises(ValueError, match=f"format {call_traces.FORMAT + 1}"):
        call_traces.from_text("x", text)
