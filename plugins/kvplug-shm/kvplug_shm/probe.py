"""Whether shared memory can be used here. Light: imported by ``kvplug list``."""

from __future__ import annotations

import os
import sys

from kvplug import ResourceExhaustedError, TransportError
from kvplug.transport import Memfd, NamedExhaustion, PeerIdentity, Probe
from kvplug_shm.native.library import library


def describe() -> Probe:
    """Works on Linux of 64 bits, between ends of one host that can reach each other's abstract sockets.

    Raises:
        ResourceExhaustedError: the process has no free descriptor or memory to find out.
    """
    reason = _missing()
    return Probe(viable=not reason, reason=reason, domain=PeerIdentity.of_this_process().domain)


def _missing() -> str:
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    if sys.maxsize < 2**32:
        return "it needs a Python of 64 bits, and this one has 32"
    if not hasattr(os, "memfd_create"):
        return "it needs memfd_create, which this Python was built without"
    try:
        library()
        os.close(Memfd.create("kvplug-probe"))
    except ResourceExhaustedError:
        raise
    except TransportError as e:
        return str(e)
    except OSError as e:
        NamedExhaustion.check(e, "making anonymous memory")
        return f"the system makes no anonymous memory: {e}"
    return ""
