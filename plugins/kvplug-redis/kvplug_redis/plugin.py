"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug.transport import DirectorySpec, StoreSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_stores() -> list[StoreSpec]:
    return [
        StoreSpec(
            name="redis",
            factory="kvplug_redis.store:RedisStore",
            options="kvplug_redis.options:RedisOptions",
            probe="kvplug_redis.probe:probe",
            summary="Pages in Redis or Valkey, for the engines of many hosts",
            persistent=True,
            cross_host=True,
        )
    ]


@hookimpl
def kvplug_directories() -> list[DirectorySpec]:
    return [
        DirectorySpec(
            name="redis",
            factory="kvplug_redis.directory:RedisDirectory",
            options="kvplug_redis.options:RedisOptions",
            probe="kvplug_redis.probe:probe",
            summary="Engines announce themselves in Redis or Valkey, and find each other there",
        )
    ]
