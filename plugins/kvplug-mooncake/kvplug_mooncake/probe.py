"""Whether the store can work here."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from typing import Final

from kvplug.transport import Probe

LIBRARIES: Final = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""System libraries that Mooncake's wheel needs, and their Debian packages."""


def probe() -> Probe:
    """Not viable if Mooncake, or a system library that it needs, is missing. Mooncake is not imported."""
    if not sys.platform.startswith("linux"):
        return Probe(viable=False, reason="Mooncake's client needs Linux")
    if importlib.util.find_spec("mooncake") is None:
        return Probe(
            viable=False,
            reason="Mooncake is not installed: pip install 'kvplug-mooncake[cpu]', or [cuda] on a machine"
            " with GPUs",
        )
    if missing := [package for library, package in LIBRARIES.items() if not _is_there(library)]:
        return Probe(
            viable=False,
            reason=f"libraries that Mooncake needs are missing: apt-get install {' '.join(missing)}",
        )
    return Probe()


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
