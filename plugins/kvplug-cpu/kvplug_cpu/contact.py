"""The contact of this pipe: one or more listening addresses, and where the first of them can be reached."""

from __future__ import annotations

from kvplug.transport import Contact


class CpuContact(Contact):
    """``cpu1 <domain> <address> [<address> ...]``."""

    NAME = "cpu"
    TRANSPORT = "cpu"
    MAX_ADDRESSES = 4
    UNREACHABLE = (
        "the peer listens on an abstract Unix socket of another host or network namespace; set its"
        " option socket to 'tcp' and its host to an address that can be reached from here"
    )
