"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import StoreSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_stores() -> list[StoreSpec]:
    return [
        StoreSpec(
            name="nixl",
            factory="kvplug_nixl.store.store:make_store",
            options="kvplug_nixl.store.options:NixlStoreOptions",
            probe="kvplug_nixl.probe:probe",
            summary="Pages in files or in S3, which NIXL reads and writes",
            persistent=True,
            cross_host=True,
        )
    ]
