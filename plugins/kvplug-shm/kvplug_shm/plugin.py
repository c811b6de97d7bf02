"""Entry point: what this distribution offers, as strings."""

from __future__ import annotations

from kvplug import TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return []
