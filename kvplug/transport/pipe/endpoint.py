"""The two verbs of a transport of kind "pipe", and those whose pipes begin with a proven connection.

Such a listener's contact is

    <transport><version> <domain> <address> [<address> ...]

An abstract Unix socket is reachable in one network namespace of one host, which ``domain`` names. A Unix
socket with a path is reachable where the folder is, which only the attempt shows.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
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
    """Waits for peers. Each ``accept`` returns one more pipe; peers connect and leave independently."""

    @property
    @abc.abstractmethod
    def contact(self) -> str:
        """A short opaque string, for one ``connect`` or many."""

    @abc.abstractmethod
    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """The pipe to the next peer that has connected and proved itself.

        Pipes that one peer connects one after the other may be accepted in another order.

        Raises:
            TimeoutError: no peer connected.
            ResourceExhaustedError: a peer connected, and the process has no free descriptor, thread or memory
                for its pipe. The listener goes on.
            ClosedError: the listener is closed (also when that happens during the wait).
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening; accepted pipes live on. Idempotent."""


class PipeEndpoint(abc.ABC):
    """What a pipe transport's factory returns: the two verbs a transport implements."""

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a pipe transport, which returns a ``PipeEndpoint``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        credentials: Credentials
        """What its listeners and connections prove themselves with."""
        host: str = DEFAULT_HOST
        """Where it may listen: on a host's interface, or, for a Unix socket, on this host only."""
        device: str = "cpu"
        """The device of the tensors, such as ``cuda:0``."""
        timeout_s: float = 30.0
        """Seconds that a call waits where it says nothing else."""
        heartbeat_timeout_s: float = 10.0
        """Seconds of silence after which a peer on another host counts as dead."""
        max_message_bytes: int | None = None
        """The largest message for which a pipe takes memory of its own; ``None``: what the process or device
        can
        have. It is compared with what a peer announces, before memory is asked for."""
        make_inner: Callable[[], PipeEndpoint] | None = None
        """For a transport that wraps another one (``TransportSpec.wraps``): makes that one's endpoint, with
        its own options and the rest of this context. ``None`` for all others."""

    @abc.abstractmethod
    def listen(self) -> PipeListener:
        """Start to listen where the context says.

        Raises:
            AddressInUseError, InsecureAddressError, TransportError: it cannot, and why.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for it.
        """

    @abc.abstractmethod
    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """A pipe to the listener that gave out ``contact``.

        Raises:
            TimeoutError: it did not answer in time.
            PeerGoneError: no process listens there any more.
            AuthenticationError: one end did not prove itself to the other.
            WireError: the contact is not one of this transport's.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for it.
        """


class _DuplexListener(Acceptor[Pipe], PipeListener):
    """A pipe of each proven connection."""


class DuplexEndpoint(PipeEndpoint):
    """Listens where :meth:`_addresses` says, and dials what the contact of such a listener names.

    One proven connection becomes one pipe: :meth:`_join` makes it, at both ends. A transport whose pipes have
    several connections overrides :meth:`_listener` and :meth:`_connect` instead.
    """

    @attrs.frozen
    class Contact:
        """Where a listener of one transport listens.

        A transport subclasses it and says what its contacts look like; ``str`` writes one.

        >>> class MyContact(DuplexEndpoint.Contact):
        ...     TRANSPORT = "mine"
        >>> MyContact.parse("mine1 - 127.0.0.1:7000").reachable()
        ('127.0.0.1:7000',)
        """

        TRANSPORT: ClassVar[str]
        """The transport's name, the first word of a contact: one of another transport is recognised by it."""
        VERSION: ClassVar[int] = 1
        MAX_ADDRESSES: ClassVar[int] = 1
        ONLY_UNIX: ClassVar[bool] = False
        """Every address is a Unix socket: both ends must be on one host, for an abstract socket in one
        domain."""
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
                    f"that is not a contact of the pipe {cls.TRANSPORT!r} (version {cls.VERSION}); pass on"
                    " what listen() gave"
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

    CONTACT: ClassVar[type[DuplexEndpoint.Contact]]
    """The class of its contacts."""
    PURPOSE: ClassVar[str]
    """The purpose that both ends prove; a listener of another protocol refuses it."""
    JOIN_TIMEOUT_S: ClassVar[float] = 10.0
    """How long a peer may take to become the other end of a pipe, once it has proved itself."""

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
        """A proven connection to one of a contact's addresses. Raises as :meth:`PipeEndpoint.connect`."""
        if deadline.expired:
            raise TimeoutError("no time was left to open the connection of a pipe")
        return Connection.dial(address, self._context.credentials, self.PURPOSE, deadline.remaining())

    def _addresses(self) -> Sequence[str]:
        """The addresses to listen at, for :meth:`kvplug.transport.Listener.open`; peers try the first one
        first.
        """
        return (Address.beside(self._context.host),)

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> Pipe:
        """The pipe over a proven connection, which it owns from here on, also if it raises.

        ``accepted``: this is the listening end, and the call comes in a thread of its own.

        Raises:
            TimeoutError, PeerGoneError, WireError, TransportError: there is no pipe.
        """
        raise NotImplementedError

    def _listener(self, listeners: list[Listener], contact: str) -> PipeListener:
        """The listener whose contact this is. It owns ``listeners`` from here on, also if it raises."""
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
        """The pipe to a listener at one of its addresses. Raises as :meth:`PipeEndpoint.connect`."""
        return self._join(self._dial(address, deadline), deadline, accepted=False)
