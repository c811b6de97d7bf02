"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import DirectorySpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_directories() -> list[DirectorySpec]:
    return [
        DirectorySpec(
            name="etcd",
            factory="kvplug_etcd.directory:EtcdDirectory",
            options="kvplug_etcd.options:EtcdOptions",
            probe="kvplug_etcd.probe:probe",
            summary="Engines announce themselves in etcd, and find each other there",
        )
    ]
