"""The entry point: what this distribution offers, as strings. ``kvplug list`` imports this module."""

from __future__ import annotations

from kvplug.transport import StoreSpec, hookimpl

KVPLUG_API = (1, 0)
"""The plugin API this was written for. Read without importing anything, so it must be a literal."""


@hookimpl
def kvplug_stores() -> list[StoreSpec]:
    return [
        StoreSpec(
            name="kept-store",
            factory="kvplug_kept_store.store:KeptStore",
            options="kvplug_kept_store.options:KeptOptions",
            summary="Pages in an SQLite database, which processes of one host share",
            persistent=True,
        )
    ]
