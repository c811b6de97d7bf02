"""The contact of this pipe: one or more listening addresses."""

from __future__ import annotations

from kvplug.transport import DuplexEndpoint


class NixlContact(DuplexEndpoint.Contact):
    """``nixl1 <domain> <address> [<address>]``."""

    TRANSPORT = "nixl"
    MAX_ADDRESSES = 2
    UNREACHABLE = (
        "the peer listens on an abstract Unix socket of another host or network namespace; set its host to an"
        " address that can be reached from here"
    )
