"""Whether the directory can work here."""

from __future__ import annotations

import importlib.util

from kvplug.transport import Probe


def probe() -> Probe:
    """Not viable if urllib3 is missing. Nothing is imported, and no server is contacted."""
    if importlib.util.find_spec("urllib3") is None:
        return Probe(viable=False, reason="urllib3 is not installed: pip install urllib3")
    return Probe()
