"""The queue "relay" of the docs and its plugin, wherever it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "docs" / "examples" / "kvplug-relay"))

from kvplug_relay import plugin
from kvplug_relay.queue import RelayEndpoint

__all__ = ["RelayEndpoint", "plugin"]
