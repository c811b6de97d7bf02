"""Whether the transports "pynccl" can work here. Light: imported by ``kvplug list``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from kvplug.transport import PeerIdentity, Probe

_DEV: Final = Path("/dev")
_GPUS: Final = ("nvidia[0-9]*", "dxg")
"""Of the driver on Linux, and of the one on Windows seen from WSL."""


def describe() -> Probe:
    """They need a GPU of NVIDIA's and a libnccl. Loads nothing."""
    reason = _missing()
    return Probe(viable=not reason, reason=reason, domain=PeerIdentity.of_this_process().domain)


def _missing() -> str:
    if not sys.platform.startswith("linux"):
        return f"NCCL needs Linux, and this is {sys.platform}"
    if not any(next(_DEV.glob(pattern), None) for pattern in _GPUS):
        return f"there is no NVIDIA GPU here (no {_DEV}/nvidia0)"
    from kvplug_pynccl.nccl.places import PACKAGE, SONAME, VARIABLE, places

    if not any(place.path and _is_there(place.path, SONAME) for place in places()):
        return f"there is no {SONAME} here: install {PACKAGE}, or name one by {VARIABLE}"
    return ""


def _is_there(path: str, soname: str) -> bool:
    if path != soname:
        return Path(path).is_file()
    import ctypes.util

    return ctypes.util.find_library("nccl") is not None  # where the loader looks
