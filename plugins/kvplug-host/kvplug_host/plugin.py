"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import StoreSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_stores() -> list[StoreSpec]:
    return [
        StoreSpec(
            name="host",
            factory="kvplug_host.factory:make_store",
            client="kvplug_host.factory:make_client",
            options="kvplug_host.options:HostOptions",
            probe="kvplug_host.probe:describe",
            summary="Pages in shared memory, which processes of the same host read themselves",
            cross_host=True,
        )
    ]
