"""Whether device memory can be shared here. Light: imported by ``kvplug list``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from kvplug.transport import NamedExhaustion, PeerIdentity, Probe

_DEV: Final = Path("/dev")
_NAMESPACES: Final = Path("/proc/self/ns")
_SHARED: Final = ("ipc", "pid")
"""Besides that of the network. The driver passes memory over sockets whose names depend on these."""
_NO_GPU: Final = ("", "-1")


def describe() -> Probe:
    """It needs Linux and an NVIDIA GPU. No library is loaded to find out."""
    reason = _missing()
    return Probe(viable=not reason, reason=reason, domain=domain())


def domain() -> str:
    """Processes of one domain can map each other's device memory. ``"-"``: the kernel does not show it.

    Raises:
        ResourceExhaustedError: this process has no descriptor or memory to look.
    """
    here = PeerIdentity.of_this_process().domain
    if here == "-":
        return here
    try:
        return "/".join([here, *(os.readlink(_NAMESPACES / each) for each in _SHARED)])
    except OSError as e:
        NamedExhaustion.check(e, "looking up the namespaces of this process")
        return "-"


def _missing() -> str:
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    if not any(_DEV.glob("nvidia[0-9]*")):
        if (_DEV / "dxg").exists():
            return "WSL cannot share device memory between processes"
        return f"there is no NVIDIA GPU here (no {_DEV}/nvidia0)"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in _NO_GPU:
        return "CUDA_VISIBLE_DEVICES leaves no GPU for this process"
    if domain() == "-":
        return "the kernel does not show the namespaces of this process"
    return ""
