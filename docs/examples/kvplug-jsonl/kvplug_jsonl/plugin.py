"""The entry point: what this distribution offers, as strings. ``kvplug list`` imports this module."""

from __future__ import annotations

from kvplug.engine import SinkSpec
from kvplug.transport import hookimpl

KVPLUG_API = (1, 0)
"""The plugin API this was written for. Read without importing anything, so it must be a literal."""


@hookimpl
def kvplug_sinks() -> list[SinkSpec]:
    return [
        SinkSpec(
            name="jsonl",
            factory="kvplug_jsonl.sink:JsonlSink",
            options="kvplug_jsonl.options:JsonlOptions",
            summary="A line of JSON in a file for what was counted since the last one",
        )
    ]
