"""The entry point of kvplug-lab: imports nothing heavy."""

from __future__ import annotations

from kvplug.transport import TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return []
