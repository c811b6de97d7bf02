"""Whether the store and the directory can work here."""

from __future__ import annotations

import importlib.util

from kvplug.transport import Probe


def probe() -> Probe:
    """Not viable if the client library is missing. It is not imported, and no server is contacted."""
    if importlib.util.find_spec("valkey") is None:
        return Probe(viable=False, reason="the client valkey is not installed: pip install 'valkey>=6.1,<7'")
    return Probe()
