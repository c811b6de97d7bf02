"""The two verbs of a transport whose pipes begin with a proven connection, and the contact they exchange.

    <transport><version> <domain> <address> [<address> ...]

An abstract Unix socket is reachable in one network namespace of one host, which ``domain`` names. A Unix
socket with a path is reachable where the folder is, which only the attempt shows.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import ClassVar, Self

import attrs

from kvplug.config.addresses import Address
from kvplug.errors import PeerGoneError, TimeoutError, TransportError, WireError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.trust.listener import Listener
from kvplug.transport.acceptor import PipeAcceptor
from kvplug.transport.pipe import Pipe, PipeContext, PipeEndpoint, PipeListener


@attrs.frozen
class Contact:
    """Where a listener of one transport listens.

    A transport subclasses it and says what its contacts look like; ``str`` writes one.

    >>> class MyContact(Contact):
    ...     TRANSPORT = "mine"
    >>> MyContact.parse("mine1 - 127.0.0.1:7000").reachable()
    ('127.0.0.1:7000',)
    """

    TRANSPORT: ClassVar[str]
    """The transport's name, the first word of a contact: one of another transport is recognised by it."""
    VERSION: ClassVar[int] = 1
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
        addresses = tuple(fields[1:])
        if (
            tag != cls._tag()
            or not 1 <= len(addresses) <= cls.MAX_ADDRESSES
            or not all(fields)
            or (cls.ONLY_UNIX and not all(each.startswith("unix:") for each in addresses))
        ):
            raise WireError(
                f"that is not a contact of the pipe {cls.TRANSPORT!r} (version {cls.VERSION}); pass on what"
                " listen() gave"
            )
        return cls(fields[0], addresses)

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
        return PeerIdentity.of_this_process().domain

    @classmethod
    def _tag(cls) -> str:
        return f"{cls.TRANSPORT}{cls.VERSION}"


class ContactEndpoint(PipeEndpoint, abc.ABC):
    """Listens where :meth:`_addresses` says, and dials what the contact of such a listener names."""

    CONTACT: ClassVar[type[Contact]]
    """The class of its contacts."""
    PURPOSE: ClassVar[str]
    """The purpose that both ends prove; a listener of another protocol refuses it."""

    def __init__(self, context: PipeContext) -> None:
        self._context = context

    def listen(self) -> PipeListener:
        listeners: list[Listener] = []
        try:
            with NamedExhaustion(f"listening for pipes {self.CONTACT.TRANSPORT!r}"):
                listeners.extend(
                    Listener.open(address, self._context.credentials, self.PURPOSE)
                    for address in self._addresses()
                )
                contact = self.CONTACT.here(*(each.contact for each in listeners))
                return self._listener(listeners, str(contact))
        except BaseException:
            for listener in listeners:
                listener.close()
            raise

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._context.timeout_s)
        with NamedExhaustion(f"connecting a pipe {self.CONTACT.TRANSPORT!r}"):
            *others, last = self.CONTACT.parse(contact).reachable()
            for address in others:
                with contextlib.suppress(PeerGoneError):
                    return self._connect(address, deadline)
            return self._connect(last, deadline)

    def _dial(self, address: str, deadline: Deadline) -> Connection:
        """A proven connection to one of a contact's addresses. Raises as :meth:`PipeEndpoint.connect`."""
        if deadline.expired:
            raise TimeoutError("no time was left to open the connection of a pipe")
        return Connection.dial(address, self._context.credentials, self.PURPOSE, deadline.remaining())

    def _addresses(self) -> Sequence[str]:
        """The addresses to listen at, for :meth:`kvplug.transport.Listener.open`; peers try the first one
        first.
        """
        return (Address.beside(self._context.host),)

    @abc.abstractmethod
    def _listener(self, listeners: list[Listener], contact: str) -> PipeListener:
        """The listener whose contact this is. It owns ``listeners`` from here on, also if it raises."""

    @abc.abstractmethod
    def _connect(self, address: str, deadline: Deadline) -> Pipe:
        """The pipe to a listener at one of its addresses. Raises as :meth:`PipeEndpoint.connect`."""


class DuplexEndpoint(ContactEndpoint, abc.ABC):
    """One connection becomes one pipe: :meth:`_join` makes it, at both ends."""

    JOIN_TIMEOUT_S: ClassVar[float] = 10.0
    """How long a peer may take to become the other end of a pipe, once it has proved itself."""

    @abc.abstractmethod
    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> Pipe:
        """The pipe over a proven connection, which it owns from here on, also if it raises.

        ``accepted``: this is the listening end, and the call comes in a thread of its own.

        Raises:
            TimeoutError, PeerGoneError, WireError, TransportError: there is no pipe.
        """

    def _listener(self, listeners: list[Listener], contact: str) -> PipeListener:
        return _Listener(self, listeners, contact)

    def _connect(self, address: str, deadline: Deadline) -> Pipe:
        return self._join(self._dial(address, deadline), deadline, accepted=False)


class _Listener(PipeAcceptor):
    def __init__(self, endpoint: DuplexEndpoint, listeners: list[Listener], contact: str) -> None:
        self._endpoint = endpoint
        transport, timeout_s = endpoint.CONTACT.TRANSPORT, endpoint._context.timeout_s
        super().__init__(listeners, transport=transport, contact=contact, timeout_s=timeout_s)

    def _join(self, connection: Connection) -> Pipe:
        deadline = Deadline.after(self._endpoint.JOIN_TIMEOUT_S)
        return self._endpoint._join(connection, deadline, accepted=True)
