"""The entry point of kvplug-testing: imports nothing heavy."""

from __future__ import annotations

from kvplug.engine import CommandSpec
from kvplug.transport import Capabilities, StoreSpec, TransportSpec, hookimpl

KVPLUG_API = (1, 0)

_FAST, _SLOW = (
    Capabilities.Cost(latency_us=10.0, gb_per_s=5.0),
    Capabilities.Cost(latency_us=100.0, gb_per_s=2.0),
)
_TRANSPORTS = (
    ("pipe", "pipe:MemoryEndpoint", _FAST, "both ends in one process"),
    ("communicator", "communicator:MemoryCommunicator", _SLOW, "the ranks' tensors go through a group"),
)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            kind=kind,
            name="memory",
            factory=f"kvplug_testing.memory.{factory}",
            options="kvplug_testing.memory.options:MemoryPipeOptions" if kind == "pipe" else None,
            probe="kvplug_testing.memory.options:describe",
            summary=f"For tests: {summary}, nothing but Python",
            capabilities=Capabilities(devices={"cpu", "simulated"} if kind == "pipe" else {"cpu"}, cost=cost),
            for_tests=True,
        )
        for kind, factory, cost, summary in _TRANSPORTS
    ]


@hookimpl
def kvplug_stores() -> list[StoreSpec]:
    return [
        StoreSpec(
            name="memory",
            factory="kvplug_testing.memory.store:MemoryStore",
            options="kvplug_testing.memory.options:MemoryStoreOptions",
            summary="For tests: pages in this process, nothing but Python",
            for_tests=True,
        ),
    ]


@hookimpl
def kvplug_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="check",
            target="kvplug_testing.check_command:check",
            summary="Load everything of a plugin, and report all that is wrong with it",
        )
    ]
