"""The contact of this plugin's listeners: one Unix socket or TCP address, and where it can be reached."""

from __future__ import annotations

from kvplug.transport import DuplexEndpoint


class PyncclContact(DuplexEndpoint.Contact):
    """``pynccl1 <domain> <address>``."""

    TRANSPORT = "pynccl"
    UNREACHABLE = (
        "the peer listens on an abstract Unix socket of another host or network namespace; set its"
        " host to an address that can be reached from here"
    )
