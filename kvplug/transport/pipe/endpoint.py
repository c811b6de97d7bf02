"""The endpoint of a pipe transport, which listens and connects, and a base for endpoints whose pipes begin
with a proven connection.

With that base, a listener's contact is

    <transport><version> <domain> <address> [<address> ...]

An abstract Unix socket is reachable within one network namespace of one host, which ``domain`` names. A Unix
socket with a path is reachable wherever its folder is; only an attempt to connect can show that.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import attrs

from kvplug.config.addresses import DEFAULT_HOST, Address
from kvplug.errors import PeerGoneError, TimeoutError, TransportError, WireError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.trust.listener import Listener
from kvplug.transport.acceptor import Acceptor
from kvplug.transport.pipe.pipe import Pipe


class PipeListener(abc.ABC):
    """Waits for peers. Each ``accept`` returns another pipe; peers connect and leave independently."""

    @property
    @abc.abstractmethod
    def contact(self) -> str:
        """A short opaque string that any number of ``connect`` calls may use."""

    @abc.abstractmethod
    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """Return the pipe to the next peer that has connected and proved itself.

        Pipes that one peer connects one after the other may be accepted in another order.

        Raises:
            TimeoutError: no peer connected.
            ResourceExhaustedError: a peer connected, but the process has no free descriptor, thread or memory
                for its pipe. The listener continues.
            ClosedError: the listener is closed, or was closed during the wait.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening; accepted pipes stay open. Idempotent."""


class PipeEndpoint(abc.ABC):
    """What a pipe transport's factory returns. It listens and connects."""

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a pipe transport, which returns a ``PipeEndpoint``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        credentials: Credentials
        """The endpoint's listeners and connections prove themselves with these."""
        host: str = DEFAULT_HOST
        """Where the endpoint may listen: an interface of this host, or a Unix socket, which only processes on
        this host can reach."""
        device: str = "cpu"
        """The device of the tensors, such as ``cuda:0``."""
        timeout_s: float = 30.0
        """The default timeout of a call, in seconds."""
        heartbeat_timeout_s: float = 10.0
        """Seconds of silence after which a peer on another host counts as dead."""
        max_message_bytes: int | None = None
        """The largest message for which a pipe allocates memory; ``None``: only the available memory of the
        process or device limits it. The size that a peer announces is checked before memory is allocated."""

    @abc.abstractmethod
    def listen(self) -> PipeListener:
        """Start to listen at the context's host.

        Raises:
            AddressInUseError, InsecureAddressError, TransportError: it cannot listen; the error says why.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for a listener.
        """

    @abc.abstractmethod
    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """Open a pipe to the listener that gave out ``contact``.

        Raises:
            TimeoutError: the listener did not answer in time.
            PeerGoneError: no process listens there any more.
            AuthenticationError: one end did not prove itself to the other.
            WireError: the contact does not belong to this transport.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for the pipe.
        """


class _DuplexListener(Acceptor[Pipe], PipeListener):
    """Makes a pipe of each proven connection."""


class DuplexEndpoint(PipeEndpoint):
    """Listens at the addresses that :meth:`_addresses` returns, and dials the addresses in a contact.

    :meth:`_join` makes one pipe of each proven connection, at both ends. A transport whose pipes have several
    connections overrides :meth:`_listener` and :meth:`_connect` instead.
    """

    @attrs.frozen
    class Contact:
        """Where a listener of one transport listens.

        Each transport subclasses it. :meth:`parse` reads a contact, and ``str`` writes it.

        >>> class MyContact(DuplexEndpoint.Contact):
        ...     TRANSPORT = "mine"
        >>> MyContact.parse("mine1 - 127.0.0.1:7000").reachable()
        ('127.0.0.1:7000',)
        """

        TRANSPORT: ClassVar[str]
        """The transport's name. A contact begins with it, so a contact of another transport is recognised."""
        VERSION: ClassVar[int] = 1
        MAX_ADDRESSES: ClassVar[int] = 1
        ONLY_UNIX: ClassVar[bool] = False
        """Whether every address must be a Unix socket. If so, both ends must be on one host, and for an
        abstract socket in one domain."""
        UNREACHABLE: ClassVar[str]
        """The error message if this process can reach no address of a listener: the cause, and what to
        change."""

        domain: str
        """The domain in which the Unix sockets among the addresses can be reached."""
        addresses: tuple[str, ...]
        """Contacts of listeners, in the order in which to try them."""

        @classmethod
        def here(cls, *addresses: str) -> Self:
            """Return the contact of a listener in this process."""
            return cls(cls.local_domain(), addresses)

        @classmethod
        def parse(cls, text: str) -> Self:
            """Return the contact that ``text`` was made from.

            Raises:
                WireError: the contact does not belong to this transport; the message does not repeat it.
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
                    f"this is not a contact of the pipe {cls.TRANSPORT!r} (version {cls.VERSION}); use the"
                    " contact of the listener that listen() returned"
                )
            return cls(fields[0], addresses)

        def __str__(self) -> str:
            return " ".join((self._tag(), self.domain, *self.addresses))

        def reachable(self) -> tuple[str, ...]:
            """Return the addresses that this process can dial, in order.

            Raises:
                TransportError: it can dial no address; the message is ``UNREACHABLE``.
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
            """Return the domain of this process, or "-" if unknown. Transports that need more than sockets
            override this."""
            return PeerIdentity.of_this_process().domain

        @classmethod
        def _tag(cls) -> str:
            return f"{cls.TRANSPORT}{cls.VERSION}"

    CONTACT: ClassVar[type[DuplexEndpoint.Contact]]
    """The class of the transport's contacts."""
    PURPOSE: ClassVar[str]
    """The purpose that both ends prove; a listener for another purpose refuses the connection."""
    JOIN_TIMEOUT_S: ClassVar[float] = 10.0
    """How many seconds a peer that has proved itself may take to become the other end of a pipe."""

    def __init__(self, context: PipeEndpoint.Context) -> None:
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
        """Open a proven connection to an address of a contact. Raises as :meth:`PipeEndpoint.connect`."""
        if deadline.expired:
            raise TimeoutError("no time was left to open the connection of a pipe")
        return Connection.dial(address, self._context.credentials, self.PURPOSE, deadline.remaining())

    def _addresses(self) -> Sequence[str]:
        """Return the addresses to listen at, for :meth:`kvplug.transport.Listener.open`. Peers try them in
        this order.
        """
        return (Address.beside(self._context.host),)

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> Pipe:
        """Make a pipe over a proven connection. Takes over the connection even if it raises.

        ``accepted``: this is the listening end, and this method runs in a thread of its own.

        Raises:
            TimeoutError, PeerGoneError, WireError, TransportError: the pipe could not be made.
        """
        raise NotImplementedError

    def _listener(self, listeners: list[Listener], contact: str) -> PipeListener:
        """Return the listener with this contact. Takes over ``listeners`` even if it raises."""
        return _DuplexListener(
            listeners,
            lambda connection: self._join(connection, Deadline.after(self.JOIN_TIMEOUT_S), accepted=True),
            what=f"the pipe {self.CONTACT.TRANSPORT!r}",
            name=f"kvplug-{self.CONTACT.TRANSPORT}",
            contact=contact,
            discard=lambda pipe: pipe.abort(),
            timeout_s=self._context.timeout_s,
        )

    def _connect(self, address: str, deadline: Deadline) -> Pipe:
        """Open a pipe to a listener at one of its addresses. Raises as :meth:`PipeEndpoint.connect`."""
        return self._join(self._dial(address, deadline), deadline, accepted=False)
