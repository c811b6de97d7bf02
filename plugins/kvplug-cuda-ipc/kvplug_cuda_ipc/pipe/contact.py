"""The contact of this pipe: where an abstract Unix socket listens, and for which processes.

cudaipc1 <domain> <contact>
"""

from __future__ import annotations

import attrs

from kvplug import TransportError
from kvplug.transport import WireError
from kvplug_cuda_ipc.probe import domain

_VERSION = "cudaipc1"


@attrs.frozen
class Contact:
    """Where a listener of this pipe listens."""

    domain: str
    contact: str

    def __str__(self) -> str:
        return f"{_VERSION} {self.domain} {self.contact}"

    @classmethod
    def parse(cls, text: str) -> Contact:
        """Raises WireError, which does not repeat the text."""
        fields = text.split(" ")
        if len(fields) != 3 or fields[0] != _VERSION or not fields[1] or not fields[2].startswith("unix:"):
            raise WireError(
                "that is not a contact of the pipe 'cuda-ipc' (version 1); pass on what listen() gave"
            )
        return cls(fields[1], fields[2])

    def reachable(self) -> str:
        """The contact to dial.

        Raises:
            TransportError: it only listens where this process cannot come.
        """
        here = domain()
        if here == "-" or here != self.domain:
            raise TransportError(
                "the peer is on another host, or in other namespaces (network, IPC, PID), and shares no"
                " device memory with this process; use a pipe for several hosts, such as 'pynccl'"
            )
        return self.contact
