"""The plugin's entry point: registers the connector "p2p"."""

from __future__ import annotations

from kvplug.engine import ConnectorSpec
from kvplug.transport import hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_connectors() -> list[ConnectorSpec]:
    return [
        ConnectorSpec(
            name="p2p",
            factory="kvplug_p2p.scheduler:P2PScheduler",
            worker_factory="kvplug_p2p.worker:P2PWorker",
            options="kvplug_p2p.options:P2POptions",
            splits_heads=True,
            hashes_on_devices=False,
            summary="A decode engine pulls a prompt's KV out of the blocks of the engine that computed it",
        )
    ]
