"""The contact of this pipe: an abstract Unix socket, and the domain in which it can be reached."""

from __future__ import annotations

from kvplug.transport import DuplexEndpoint


class ShmContact(DuplexEndpoint.Contact):
    """``shm1 <domain> <address>``."""

    TRANSPORT = "shm"
    ONLY_UNIX = True
    UNREACHABLE = (
        "the peer listens on an abstract Unix socket of another host or network namespace, and"
        " shares no memory with this process; use a pipe for several hosts, such as 'cpu'"
    )
