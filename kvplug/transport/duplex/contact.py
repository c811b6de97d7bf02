"""The contact of a listening pipe: addresses, and from where each can be reached.

    <name><version> <domain> <address> [<address> ...]

An abstract Unix socket is reachable in one network namespace of one host, which ``domain`` names. A Unix
socket with a path is reachable where the folder is, which only the attempt shows.
"""

from __future__ import annotations

from typing import ClassVar, Self

import attrs

from kvplug.errors import TransportError, WireError
from kvplug.net.trust.addresses import local_domain


@attrs.frozen
class Contact:
    """Where a listener of one transport listens.

    A transport subclasses it and says what its contacts look like; ``str`` writes one.

    >>> class MyContact(Contact):
    ...     NAME = TRANSPORT = "mine"
    >>> MyContact.parse("mine1 - 127.0.0.1:7000").reachable()
    ('127.0.0.1:7000',)
    """

    NAME: ClassVar[str]
    """The first word of a contact, by which a contact of another transport is recognised."""
    VERSION: ClassVar[int] = 1
    TRANSPORT: ClassVar[str]
    """The transport's name, for errors."""
    MAX_ADDRESSES: ClassVar[int] = 1
    ONLY_UNIX: ClassVar[bool] = False
    """Every address is a Unix socket: both ends must be on one host, for an abstract socket in one domain."""
    UNREACHABLE: ClassVar[str]
    """The error if no address of a listener can be reached from here: the cause, and what to change."""

    domain: str
    """The domain in which the Unix sockets among the addresses can be reached."""
    addresses: tuple[str, ...]
    """Contacts of listeners; the first is to be tried first."""

    @classmethod
    def here(cls, *addresses: str) -> Self:
        """The contact of a listener in this process."""
        return cls(cls.local_domain(), addresses)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The contact that ``text`` was made from.

        Raises:
            WireError: it is not one of this transport's; the message does not repeat the text.
        """
        tag, *fields = text.split(" ")
        if tag != cls._tag() or not 2 <= len(fields) <= 1 + cls.MAX_ADDRESSES or not all(fields):
            raise cls._wrong()
        domain, *addresses = fields
        if cls.ONLY_UNIX and not all(each.startswith("unix:") for each in addresses):
            raise cls._wrong()
        return cls(domain, tuple(addresses))

    def __str__(self) -> str:
        return " ".join((self._tag(), self.domain, *self.addresses))

    def reachable(self) -> tuple[str, ...]:
        """The addresses that this process can dial, in order; at least one.

        Raises:
            TransportError: there is none; the message is ``UNREACHABLE``.
        """
        here = self.local_domain()
        if here != "-" and here == self.domain:
            return self.addresses
        found = tuple(each for each in self.addresses if not each.startswith("unix:") or each[5:6] == "/")
        if not found:
            raise TransportError(self.UNREACHABLE)
        return found

    @classmethod
    def local_domain(cls) -> str:
        """The domain of this process; "-" where it has none. A transport may need more than sockets."""
        return local_domain()

    @classmethod
    def _tag(cls) -> str:
        return f"{cls.NAME}{cls.VERSION}"

    @classmethod
    def _wrong(cls) -> WireError:
        return WireError(
            f"that is not a contact of the pipe {cls.TRANSPORT!r} (version {cls.VERSION}); pass on what"
            " listen() gave"
        )
