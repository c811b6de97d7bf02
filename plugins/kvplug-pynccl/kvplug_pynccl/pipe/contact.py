"""The contact of this pipe: where its listener listens, and in which network namespace of which host.

nccl1 <domain> <contact>
"""

from __future__ import annotations

import attrs

from kvplug import TransportError
from kvplug.transport import WireError, local_domain

_VERSION = "nccl1"


@attrs.frozen
class Contact:
    """Where a listener of this pipe listens. The contact may carry a token: not for logs."""

    domain: str
    contact: str = attrs.field(repr=False)

    def __str__(self) -> str:
        return f"{_VERSION} {self.domain} {self.contact}"

    @classmethod
    def parse(cls, text: str) -> Contact:
        """Raises WireError, which does not repeat the text."""
        fields = text.split(" ")
        if len(fields) != 3 or fields[0] != _VERSION or not all(fields):
            raise WireError(
                "that is not a contact of the pipe 'pynccl' (version 1); pass on what listen() gave"
            )
        return cls(fields[1], fields[2])

    def reachable(self) -> str:
        """The contact to dial.

        Raises:
            TransportError: it only listens where this process cannot come.
        """
        here = local_domain()
        if self.contact.startswith("unix:") and (here == "-" or here != self.domain):
            raise TransportError(
                "the peer listens on an abstract Unix socket of another host or network namespace; set its"
                " host to an address that can be reached from here"
            )
        return self.contact
