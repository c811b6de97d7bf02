"""Programs that tests run in other processes, and stores that they use."""

from __future__ import annotations

from typing import Any

from kvplug import Config
from kvplug.assembly.stores import serve_store
from kvplug_testing import peers


def config(**options: Any) -> Config:
    """Of a program that opens a store with these options."""
    common = {
        key: options.pop(key) for key in ("transport", "timeout_s", "host", "integrity") if key in options
    }
    return Config.from_dict(
        {"stores": ["host"], "timeout_s": 20, "connect_timeout_s": 20, **common, "options": {"host": options}}
    )


def serve(parent: peers.Parent, address: str, options: dict[str, Any]) -> None:
    """Serve a store until the parent says so."""
    with serve_store(config(**options), address=address) as server:
        parent.send(server.contact)
        parent.recv(None)
