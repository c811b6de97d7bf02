"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import StoreSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_stores() -> list[StoreSpec]:
    return [
        StoreSpec(
            name="mooncake",
            factory="kvplug_mooncake.store:MooncakeStore",
            options="kvplug_mooncake.options:MooncakeOptions",
            probe="kvplug_mooncake.probe:probe",
            summary="Pages in the memory that Mooncake's store pools, for the engines of many hosts",
            persistent=True,
            cross_host=True,
        )
    ]
