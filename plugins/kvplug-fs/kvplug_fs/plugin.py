"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import StoreSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_stores() -> list[StoreSpec]:
    return [
        StoreSpec(
            name="fs",
            factory="kvplug_fs.store:make_store",
            options="kvplug_fs.options:FolderOptions",
            summary="Pages as files in a folder, on a local disk or shared by several hosts",
            persistent=True,
            cross_host=True,
        )
    ]
