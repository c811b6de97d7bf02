"""The hooks of kvplug. They only collect: the data path never goes through one.

A plugin's entry-point module states the API it was written for as a literal, which is read without
importing it, and implements what it needs:

    from kvplug.transport import TransportSpec, hookimpl

    KVPLUG_API = (1, 0)

    @hookimpl
    def kvplug_transports():
        return [TransportSpec(kind="pipe", name="rdma", factory="kvplug_rdma.endpoint:Endpoint")]
"""

from __future__ import annotations

from typing import Final

import pluggy

from kvplug.transport.spec import (
    CommandSpec,
    ConnectorSpec,
    DirectorySpec,
    SinkSpec,
    StoreSpec,
    TransportSpec,
)

PROJECT: Final = "kvplug"
"""Name of the pluggy project and of the entry-point group."""

PLUGIN_API: Final = (1, 0)
"""(major, minor). A plugin loads if its major is the same and its minor not newer."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's functions as implementations of the hooks below."""


@hookspec
def kvplug_transports() -> list[TransportSpec]:  # type: ignore[empty-body]
    """Pipes, message queues, lookup buffers and device communicators that the plugin offers."""


@hookspec
def kvplug_stores() -> list[StoreSpec]:  # type: ignore[empty-body]
    """Stores of KV pages that the plugin offers."""


@hookspec
def kvplug_directories() -> list[DirectorySpec]:  # type: ignore[empty-body]
    """Directories of engines that the plugin offers."""


@hookspec
def kvplug_connectors() -> list[ConnectorSpec]:  # type: ignore[empty-body]
    """Connectors that the plugin offers."""


@hookspec
def kvplug_sinks() -> list[SinkSpec]:  # type: ignore[empty-body]
    """Sinks for metrics."""


@hookspec
def kvplug_commands() -> list[CommandSpec]:  # type: ignore[empty-body]
    """Commands of the program ``kvplug``."""


OFFERED: Final = {
    "kvplug_transports": TransportSpec,
    "kvplug_stores": StoreSpec,
    "kvplug_directories": DirectorySpec,
    "kvplug_connectors": ConnectorSpec,
    "kvplug_sinks": SinkSpec,
    "kvplug_commands": CommandSpec,
}
"""Each hook, and what its implementations return a list of."""
