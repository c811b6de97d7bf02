"""The entry point of kvplug-bench: imports nothing heavy."""

from __future__ import annotations

from kvplug.engine import CommandSpec
from kvplug.transport import hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="bench",
            target="kvplug_bench.command:bench",
            summary="Measure the speed of transports on this host",
        )
    ]
