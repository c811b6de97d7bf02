"""The hooks of kvplug. They only collect what plugins offer: the data path never calls a hook.

A plugin's entry-point module states, as a literal, the version of the API it was written for, and implements
the hooks it needs. kvplug reads the literal without importing the module:

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
"""(major, minor). A plugin loads if its major version is the same and its minor version is not newer."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's functions as implementations of the hooks below."""


@hookspec
def kvplug_transports() -> list[TransportSpec]:  # type: ignore[empty-body]
    """Return the pipes, message queues, lookup buffers and device communicators that the plugin offers."""


@hookspec
def kvplug_stores() -> list[StoreSpec]:  # type: ignore[empty-body]
    """Return the stores of KV pages that the plugin offers."""


@hookspec
def kvplug_directories() -> list[DirectorySpec]:  # type: ignore[empty-body]
    """Return the directories of engines that the plugin offers."""


@hookspec
def kvplug_connectors() -> list[ConnectorSpec]:  # type: ignore[empty-body]
    """Return the connectors that the plugin offers."""


@hookspec
def kvplug_sinks() -> list[SinkSpec]:  # type: ignore[empty-body]
    """Return the sinks for metrics that the plugin offers."""


@hookspec
def kvplug_commands() -> list[CommandSpec]:  # type: ignore[empty-body]
    """Return the commands that the plugin adds to the program ``kvplug``."""


OFFERED: Final = {
    "kvplug_transports": TransportSpec,
    "kvplug_stores": StoreSpec,
    "kvplug_directories": DirectorySpec,
    "kvplug_connectors": ConnectorSpec,
    "kvplug_sinks": SinkSpec,
    "kvplug_commands": CommandSpec,
}
"""The class of the specs that each hook returns."""
