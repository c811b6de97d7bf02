"""Config + Registry -> stores: opened here, reached at a peer, or served to other programs."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.peers import ControlPeers, LinkServer
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig, credentials_of, make_hello
from kvplug.config import Config
from kvplug.errors import ClosedError, KvplugError, PluginError, TimeoutError
from kvplug.metrics.record import RecordedStore
from kvplug.metrics.stats import TransferStats
from kvplug.net.deadline import Deadline
from kvplug.net.threads import BackgroundThread
from kvplug.transport.context import StoreContext
from kvplug.transport.spec import Kind, StoreSpec
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.executor import ExecutedStore
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.store import Store, StoreLink

logger = logging.getLogger(__name__)

PURPOSE = "store"
"""The purpose of a link to a program that serves a store."""


class StoreOpener:
    """Opens the stores of one config."""

    def __init__(self, resolved: ResolvedConfig, settings: LinkSettings) -> None:
        """``settings``: of links that pose as no engine, for stores that another program serves."""
        self._resolved = resolved
        self._settings = settings

    def open(self, name: str) -> Store:
        """The store of that name.

        Raises:
            UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
            ConfigError: its options are wrong.
            PluginError: it cannot work here, or its factory returned something else.
        """
        spec = self._spec(name)
        context = self._context(spec)
        made = spec.load_factory()(context)
        if isinstance(made, BlockingStore):
            made = ExecutedStore(
                made, name=spec.name, seal=context.seal, timeout_s=self._resolved.config.timeout_s
            )
        return self._recorded(spec, made)

    def client(self, name: str, link: StoreLink) -> Store:
        """This process's end of the store that the peer at the other end of the link serves.

        Raises:
            UnknownTransportError, AmbiguousNameError, ConfigError: as :meth:`open`.
            PluginError: that store serves no peers.
        """
        spec = self._spec(name)
        if spec.client is None:
            raise PluginError(f"the store {spec.name!r} serves no other processes: name another one first")
        return self._recorded(spec, spec.load_client()(self._context(spec), link))

    def _spec(self, name: str) -> StoreSpec:
        spec = self._resolved.registry.get(Kind.STORE, name)
        probe = spec.run_probe()
        if not probe.viable:
            raise PluginError(f"the store {spec.name!r} cannot work here: {probe.reason}")
        return spec

    def _context(self, spec: StoreSpec) -> StoreContext:
        config, settings = self._resolved.config, self._settings
        secret = settings.credentials.secret
        return StoreContext(
            options=self._resolved.options_of(spec),
            credentials=settings.credentials,
            seal=PageSeal(
                checksums=config.integrity != "off", secret=None if secret is None else secret.reveal()
            ),
            buffer_size=config.buffer_size,
            timeout_s=config.timeout_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            connect=self._connect,
        )

    def _connect(self, address: str, timeout: float | None) -> StoreLink:
        peers = ControlPeers(self._settings, connect=address)
        return peers.connect(0, PURPOSE, timeout=timeout, retry=False)

    def _recorded(self, spec: StoreSpec, made: Any) -> Store:
        if not isinstance(made, Store):
            raise PluginError(f"store {spec.name!r} made {made!r}, which is no Store; subclass it")
        return RecordedStore(made, self._settings.stats)


def store_links(resolved: ResolvedConfig, stats: TransferStats) -> LinkSettings:
    """The settings of links between programs and stores, with no engine behind them."""
    return LinkSettings(
        config=resolved.config,
        credentials=credentials_of(resolved.config),
        hello=functools.partial(make_hello, resolved, None, True),
        endpoint=resolved.pipe_endpoint,
        pipe_options=resolved.pipe_options,
        stats=stats,
        missing=resolved.registry.failures(),
    )


def build_store(config: Config, name: str | None = None, *, registry: Registry | None = None) -> Store:
    """The store ``name``, by default the first of the config's ``stores``, without an engine around it.

    Raises:
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        ConfigError: its options are wrong; every fault at once.
        PluginError: it cannot work here, or its factory returned something else.
        InsecureAddressError: other hosts can reach the config's host, and there is no secret.
    """
    resolved = ResolvedConfig(config, Registry.from_env() if registry is None else registry)
    resolved.check(keys=("stores", "transport", "integrity"))
    return StoreOpener(resolved, store_links(resolved, TransferStats())).open(name or config.stores[0])


class StoreServer:
    """Serves one store to other programs until it is closed; made by :func:`serve_store`."""

    def __init__(self, store: Store, settings: LinkSettings, address: str | None) -> None:
        self.store = store
        self._peers = ControlPeers(settings, listen=address)
        self._lock = threading.Lock()
        self._served: dict[ControlLink, threading.Thread] = {}
        self._closed = False
        self._server: LinkServer[ControlLink] = self._peers.serve(self._check, ControlLink.close)
        self.contact: str = self._server.contact
        """Where other programs reach the store. May carry a token; do not log it."""
        self._thread = BackgroundThread(self._run, name="kvplug-store-serve", stop=self._peers.close)
        self._thread.start()

    @property
    def num_clients(self) -> int:
        """Programs that are connected."""
        with self._lock:
            return len(self._served)

    @staticmethod
    def _check(link: ControlLink, deadline: Deadline) -> ControlLink:
        if link.agreement.purpose != PURPOSE:
            link.close()
            raise ClosedError(f"it connects for {link.agreement.purpose!r}, and here is a store")
        return link

    def _run(self) -> None:
        while True:
            try:
                link = self._server.accept(timeout=None)
            except ClosedError:
                return
            except TimeoutError:
                continue
            thread = BackgroundThread(self._serve, args=(link,), name="kvplug-store-client", stop=link.close)
            with self._lock:
                self._served[link] = thread
                try:
                    if not self._closed:
                        thread.start()
                        continue
                except RuntimeError as e:
                    logger.warning("%s is not served: %s", link, e)
                del self._served[link]
            link.close()

    def _serve(self, link: ControlLink) -> None:
        logger.info("%s uses the store", link.channel.peer)
        try:
            self.store.serve(link)
        except KvplugError as e:
            logger.warning("serving the store to %s ended: %s", link.channel.peer, e)
        except Exception:
            logger.exception("serving the store to %s failed", link.channel.peer)
        finally:
            link.close()
            with self._lock:
                self._served.pop(link, None)

    def close(self) -> None:
        """Stop listening, hang up on every program, and close the store. Idempotent."""
        with self._lock:
            self._closed = True
            served = list(self._served.items())
        self._peers.close()
        for link, _ in served:
            link.close()
        self.store.close()
        deadline = Deadline.after(2.0)
        for thread in (self._thread, *(thread for _, thread in served)):
            thread.join(deadline.remaining())

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        InsecureAddressError, AddressInUseError: it cannot listen there.
    """
    resolved = ResolvedConfig(config, Registry.from_env() if registry is None else registry)
    resolved.check(keys=("stores", "transport", "integrity"))
    settings = store_links(resolved, TransferStats())
    spec = resolved.registry.get(Kind.STORE, name or config.stores[0])
    if spec.client is None:
        raise PluginError(f"the store {spec.name!r} serves no other processes")
    store = StoreOpener(resolved, settings).open(name or config.stores[0])
    try:
        return StoreServer(store, settings, address)
    except BaseException:
        store.abort()
        raise
