"""Whether device memory can be shared here. Light: imported by ``kvplug list``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from kvplug.transport import Probe, local_domain

_DEV: Final = Path("/dev")
_NAMESPACES: Final = Path("/proc/self/ns")
_SHARED: Final = ("ipc", "pid")
"""Beside that of the network. The driver names the sockets over which it hands memory over by these."""
_NO_GPU: Final = ("", "-1")


def describe() -> Probe:
    """It needs a GPU of NVIDIA's on Linux; nothing is loaded to find out."""
    reason = _missing()
    return Probe(viable=not reason, reason=reason, domain=domain())


def domain() -> str:
    """Which processes can map each other's device memory. ``"-"``: the kernel does not tell."""
    here = local_domain()
    if here == "-":
        return here
    try:
        return "/".join([here, *(os.readlink(_NAMESPACES / each) for each in _SHARED)])
    except OSError:
        return "-"


def _missing() -> str:
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    if not any(_DEV.glob("nvidia[0-9]*")):
        if (_DEV / "dxg").exists():
            return "under Windows no device memory is shared between processes"
        return f"there is no GPU of NVIDIA's here (no {_DEV}/nvidia0)"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in _NO_GPU:
        return "CUDA_VISIBLE_DEVICES leaves no GPU for this process"
    if domain() == "-":
        return "the kernel does not tell the namespaces of this process"
    return ""
