"""Opens the stores that a config names, reaches those of a peer, and serves them to other programs."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable

import attrs

from kvplug.assembly.health import Health
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.making import made
from kvplug.assembly.peers import ControlPeers, LinkServer
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig, labels_of
from kvplug.assembly.slow_path import watch_store
from kvplug.assembly.state import ProcessState, StoreState
from kvplug.assembly.watching import observe
from kvplug.config.addresses import DEFAULT_HOST, Address
from kvplug.config.config import Config
from kvplug.errors import ClosedError, PluginError
from kvplug.metrics.record import StoreRecorder
from kvplug.metrics.stats import TransferStats
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.log import LogEvent
from kvplug.net.wire import from_plain, to_plain
from kvplug.transport.spec import Kind, StoreSpec
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.executor import ExecutedStore
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.staging.memory import PinnedMemory
from kvplug.transport.store.staging.staging import Staging
from kvplug.transport.store.store import Store

logger = logging.getLogger(__name__)

PURPOSE = "store"
"""The purpose of a link to a program that serves a store."""
STATS_PURPOSE = "store stats"
"""The purpose of a short link that asks such a program for the statistics of its store."""
_MAX_CLIENTS = 1024


class StoreOpener:
    """Opens the stores of one config."""

    def __init__(self, settings: LinkSettings) -> None:
        """``settings``: for links to programs that serve stores; these links do not belong to an engine."""
        self._settings, self._resolved = settings, settings.resolved
        self._memory = PinnedMemory(self._resolved.config.staging_size)

    def open(self, name: str) -> Store:
        """Open the store of that name.

        Raises:
            UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
            ConfigError: the store's options are wrong.
            PluginError: the store cannot work here, or its factory failed or did not return a store.
            ResourceExhaustedError: a descriptor, thread, memory or space ran out.
        """
        spec = self._resolved.usable(Kind.STORE, name)
        store = self._opened(spec, spec.load_factory())
        self._settings.state.add(
            store, lambda store: None if store.is_lost else StoreState.of(store, spec.name)
        )
        return store

    def client(self, name: str, link: Store.Link) -> Store:
        """Make this process's end of the store that the peer of ``link`` serves.

        Raises:
            UnknownTransportError, AmbiguousNameError, ConfigError: as :meth:`open`.
            PluginError: that store cannot be served to peers, or its client factory failed.
            ResourceExhaustedError: a descriptor, thread, memory or space ran out, at either end.
        """
        spec = self._resolved.usable(Kind.STORE, name)
        if spec.client is None:
            raise PluginError(
                f"the store {spec.name!r} cannot be served to other processes: name another one first"
            )
        maker = spec.load_client()
        return self._opened(spec, lambda context: maker(context, link))

    def _opened(self, spec: StoreSpec, factory: Callable[[Store.Context], Store | BlockingStore]) -> Store:
        config, stats, secret = self._resolved.config, self._settings.stats, self._settings.credentials.secret
        seal = PageSeal(
            checksums=config.integrity != "off", secret=None if secret is None else secret.reveal()
        )
        context = self._resolved.context(spec, seal=seal, connect=self._connect, on_served=self._on_served)
        with NamedExhaustion(f"opening {spec.called}"):
            store: Store | BlockingStore = made(spec, context, factory=factory)
            if isinstance(store, BlockingStore):
                store = ExecutedStore(store, name=spec.name, seal=seal, timeout_s=config.timeout_s)
        store.staging = Staging(store, timeout_s=config.timeout_s, memory=self._memory)
        store.recorder = StoreRecorder(stats, watch_store(store, spec.name, config, stats))
        return store

    def _on_served(self, traceparent: str, begun: float, num_pages: int) -> None:
        self._settings.spans.record("serve", "", begun, parent=traceparent, num_pages=num_pages)

    def _connect(self, address: str, timeout: float | None) -> Store.Link:
        peers = ControlPeers(self._settings, connect=address)
        return peers.connect(0, PURPOSE, timeout=timeout, retry=False)


def build_store(config: Config, name: str | None = None, *, registry: Registry | None = None) -> Store:
    """Open the store ``name`` without an engine. ``name`` defaults to the first of the config's ``stores``.

    Raises:
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        ConfigError: the store's options are wrong; the error lists every fault.
        PluginError: the store cannot work here, or its factory did not return a store.
        InsecureAddressError: the config has a TCP address, but neither a secret nor TLS.
    """
    resolved = ResolvedConfig.to_build(config, registry, "stores", "transport", "integrity")
    return StoreOpener(LinkSettings(resolved=resolved)).open(name or config.stores[0])


class StoreServer(LinkServer[None]):
    """Serves one store to other programs until it is closed; made by :func:`serve_store`.

    Other programs reach the store at its ``contact``. :meth:`close` hangs up on every program, and closes the
    store.
    """

    def __init__(
        self,
        store: Store,
        settings: LinkSettings,
        address: str | None,
        *,
        name: str = "store",
        reporting: contextlib.ExitStack | None = None,
    ) -> None:
        """``reporting``: closed last, after the store."""
        self._reporting = reporting or contextlib.ExitStack()
        self.store = store
        """The store that is served."""
        self.name = name
        """The store's name, as configs use it."""
        self._links: set[ControlLink] = set()
        address = address or settings.config.control_address()
        super().__init__(settings, address, self._serve_link, max_served=_MAX_CLIENTS)

    @property
    def num_clients(self) -> int:
        """The number of connected programs."""
        return sum(link.agreement.purpose == PURPOSE for link in self._links.copy())

    def _serve_link(self, link: ControlLink, _: Deadline) -> None:
        purpose = link.agreement.purpose
        if purpose == STATS_PURPOSE:
            link.channel.send(to_plain(self.stats()))
            return
        if purpose != PURPOSE:
            raise ClosedError(f"the peer connected for {purpose!r}, but this program serves a store")
        self._links.add(link)
        try:
            self.store.serve(link)
        finally:
            self._links.discard(link)
            peer = link.channel.peer
            text = f"{peer} left the store {self.name!r}; it has {self.num_clients} users"
            LogEvent.PEER_LEFT.log(logger, text, peer=peer, store=self.name)

    def stats(self) -> StoreState:
        """Return what the store holds now, and how many programs use it."""
        return StoreState.of(self.store, self.name, self.num_clients)

    def health(self) -> Health:
        """Check whether programs can use the store. May wait for the store's lock."""
        if self.closed:
            return Health(not_ready=("the program is ending",))
        if self.store.is_lost:
            return Health(not_live=("the store is closed or lost",))
        listener = Address.parse_contact(self.contact)
        is_gone = listener.is_path and not os.path.exists(listener.name)
        return Health(
            not_live=("the file of its socket was removed",) if is_gone else (),
            not_ready=tuple(filter(None, [self._obstacle()])),
            facts={"store": attrs.asdict(self.stats())},
        )

    def close(self) -> None:
        with self._reporting:
            super().close()
            self.store.close()


def _host_of(address: str) -> str:
    """Return the config's ``host`` for a program that listens at this address."""
    parsed = Address.parse(address)
    return parsed.host if not parsed.is_unix else str(parsed) if parsed.name else DEFAULT_HOST


def serve_store(
    config: Config,
    name: str | None = None,
    address: str | None = None,
    *,
    registry: Registry | None = None,
) -> StoreServer:
    """Open a store and serve it to other programs, at ``address`` or at the config's host and port.

    Raises:
        UnknownTransportError, AmbiguousNameError, ConfigError, PluginError: as :func:`build_store`.
        InsecureAddressError, AddressInUseError: the server cannot listen there.
    """
    if address is not None:
        config = attrs.evolve(config, host=_host_of(address))  # pipes listen where the link does
    keys = ("stores", "transport", "integrity", "sinks", "tracing")
    resolved = ResolvedConfig.to_build(config, registry, *keys)
    spec = resolved.registry.get(Kind.STORE, name or config.stores[0])
    stats = TransferStats()
    labels = labels_of(config, connector="", side="store", rank=0)
    settings = LinkSettings(resolved=resolved, stats=stats, state=ProcessState(stats, labels))
    if spec.client is None:
        raise PluginError(f"the store {spec.name!r} cannot be served to other processes")
    settings.hello(PURPOSE)  # loads the pipes and torch now, so that the first program does not wait for them
    with contextlib.ExitStack() as opened:
        reporting = opened.enter_context(contextlib.ExitStack())
        observe(settings, reporting)
        store = StoreOpener(settings).open(name or config.stores[0])
        opened.callback(store.abort)
        server = StoreServer(store, settings, address, name=spec.name, reporting=reporting)
        opened.pop_all()
    return server


def store_stats(config: Config, contact: str, *, registry: Registry | None = None) -> StoreState:
    """Ask the program at ``contact`` about the store that it serves.

    Raises:
        PeerGoneError, TimeoutError: no program answers there.
        HandshakeError, AuthenticationError: the two ends cannot work together; the error lists the reasons.
        WireError: the program does not serve a store.
    """
    resolved = ResolvedConfig(config, registry)
    peers = ControlPeers(LinkSettings(resolved=resolved), connect=contact)
    link = peers.connect(0, STATS_PURPOSE, timeout=config.connect_timeout_s, retry=False)
    try:
        found = link.channel.recv(timeout=config.timeout_s)
    finally:
        link.close()
    return from_plain(found, StoreState, f"the report of {link.channel.peer} about its store")
