"""The entry point: what this distribution offers, as strings. ``kvplug list`` imports this module."""

from __future__ import annotations

from kvplug.engine import ConnectorSpec
from kvplug.transport import hookimpl

KVPLUG_API = (1, 0)
"""The plugin API this was written for. Read without importing anything, so it must be a literal."""


@hookimpl
def kvplug_connectors() -> list[ConnectorSpec]:
    return [
        ConnectorSpec(
            name="shelf",
            factory="kvplug_shelf.scheduler:ShelfScheduler",
            worker_factory="kvplug_shelf.worker:ShelfWorker",
            options="kvplug_shelf.options:ShelfOptions",
            summary="Whole prompts in a folder: one engine saves them, others load what begins alike",
        )
    ]
