"""Whether the store "host" can work here. Light: imported by ``kvplug list``."""

from __future__ import annotations

import os
import sys

from kvplug.transport import Memfd, NamedExhaustion, PeerIdentity, Probe


def describe() -> Probe:
    """Works on Linux. Ends of equal domains can reach its abstract sockets.

    Raises:
        ResourceExhaustedError: the process has no free descriptor or memory to find out.
    """
    reason = _missing()
    return Probe(viable=not reason, reason=reason, domain=PeerIdentity.of_this_process().domain)


def _missing() -> str:
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    if not hasattr(os, "memfd_create"):
        return "it needs memfd_create, which this Python was built without"
    try:
        os.close(Memfd.create("kvplug-probe"))
    except OSError as e:
        NamedExhaustion.check(e, "making anonymous memory")
        return f"the system makes no anonymous memory: {e}"
    return ""
