"""The contact of this pipe: one or more listening addresses, and where the first of them can be reached.

    cpu1 <domain> <contact> [<contact>]

An abstract Unix socket is reachable in one network namespace of one host, which ``domain`` names.
"""

from __future__ import annotations

import attrs

from kvplug import TransportError
from kvplug.transport import WireError, local_domain

_VERSION = "cpu1"
_MAX_CONTACTS = 4


@attrs.frozen
class Contact:
    """Where a listener of this pipe listens. The contacts may carry tokens: not for logs."""

    domain: str
    contacts: tuple[str, ...] = attrs.field(repr=False)

    def __str__(self) -> str:
        return " ".join((_VERSION, self.domain, *self.contacts))

    @classmethod
    def parse(cls, text: str) -> Contact:
        """Raises WireError, which does not repeat the text."""
        fields = text.split(" ")
        if len(fields) < 3 or fields[0] != _VERSION or len(fields) > 2 + _MAX_CONTACTS or not all(fields):
            raise WireError("that is not a contact of the pipe 'cpu' (version 1); pass on what listen() gave")
        return cls(fields[1], tuple(fields[2:]))

    def reachable(self) -> list[str]:
        """The contacts to try, in order.

        Raises:
            TransportError: it only listens where this process cannot come.
        """
        here = local_domain()
        if here != "-" and here == self.domain:
            return list(self.contacts)
        found = [c for c in self.contacts if not c.startswith("unix:")]
        if not found:
            raise TransportError(
                "the peer listens on an abstract Unix socket of another host or network namespace; set its"
                " option socket to 'tcp' and its host to an address that can be reached from here"
            )
        return found
