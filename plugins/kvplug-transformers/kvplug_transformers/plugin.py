"""The entry point of kvplug-transformers: imports nothing heavy."""

from __future__ import annotations

from kvplug.engine import CommandSpec
from kvplug.transport import hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_commands() -> list[CommandSpec]:
    """The command that demonstrates kvplug with a real model."""
    return [
        CommandSpec(
            name="demo",
            target="kvplug_transformers.demo.command:demo",
            summary="Prefill in one process, decode in another: a real model's KV cache crosses between them",
        )
    ]
