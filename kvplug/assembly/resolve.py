"""Resolves the names in a config against a registry: finds each name's spec and fills its options.

The other modules of this package use this to build connectors, pipes, message queues, lookup buffers and
communicators.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal

import attrs

import kvplug
from kvplug.assembly.budgets import budgets_of, shortage_of
from kvplug.assembly.making import MADE, made
from kvplug.assembly.registry import Registry
from kvplug.assembly.registry.check import CHECKED, CHOSEN, NAMED, name_faults, options_of
from kvplug.assembly.registry.packages import PACKAGES
from kvplug.config.addresses import Address
from kvplug.config.config import KEYS, Config, Role
from kvplug.config.messages import listed
from kvplug.config.options import option_fields
from kvplug.errors import ConfigError, HandshakeError, PluginError, PluginLoadError
from kvplug.metrics.sinks import Sink
from kvplug.negotiation.hello import EngineFacts, Hello
from kvplug.negotiation.select import AUTO, Offer, Selection, select
from kvplug.net.affinity import choose_cpus
from kvplug.net.log import LogEvent
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.trust.tls import TlsFiles
from kvplug.net.wire.checksum import available
from kvplug.transport.capabilities import Capabilities, Requirements
from kvplug.transport.pipe import PipeEndpoint
from kvplug.transport.spec import ConnectorSpec, Kind, Probe, TransportSpec

logger = logging.getLogger(__name__)

EPOCH = uuid.uuid4().hex
"""The epoch of this process. It changes at restart, so that stale references are recognised."""


_short: set[str] = set()
"""Keys of budgets whose shortage was already logged."""
TransportKind = Literal[Kind.PIPE, Kind.QUEUE, Kind.LOOKUP_BUFFER, Kind.COMMUNICATOR]
_KEY_OF: Final = {kind: key for key, kind in CHOSEN.items()}


class ResolvedConfig:
    """The names in one config, looked up in one registry."""

    def __init__(self, config: Config, registry: Registry | None = None) -> None:
        """``registry``: resolves names; ``None`` loads the installed plugins.

        Raises:
            TypeError: ``config`` is not a Config.
        """
        _ensure_config(config)
        self.config = config
        self.registry = Registry.from_env() if registry is None else registry
        self._viable: dict[str, Probe] = {}
        """Probes of pipe transports that can work here, by their names."""

    @classmethod
    def to_build(cls, config: Config, registry: Registry | None, *keys: str) -> ResolvedConfig:
        """Resolve a config in order to build something from it now.

        ``keys``: the config keys to check.

        Raises:
            ConfigError: this process may not use any of the CPUs that the config lists; or as :meth:`check`.
        """
        resolved = cls(config, registry)
        choose_cpus(config.thread_cpus)
        if keys:
            resolved.check(keys)
        return resolved

    @functools.cached_property
    def pipes(self) -> dict[str, TransportSpec]:
        """Every pipe transport, by bare name. A name that two plugins offer is included only if the config
        names it with its distribution."""
        specs = {spec.name: spec for spec in self.registry.specs(Kind.PIPE)}
        if self.config.transport != AUTO:
            named = self.registry.get(Kind.PIPE, self.config.transport)
            specs[named.name] = named
        return specs

    @property
    def requested_transport(self) -> str:
        """The bare name of the configured pipe, or ``"auto"``."""
        return self.config.transport.rpartition(":")[2]

    def offers(self, *, load: bool = True) -> tuple[Offer, ...]:
        """Return this host's offers to a peer: every pipe transport. A transport that can work here is probed
        once. Any other is probed each time, because it may work later.

        ``load``: also load the code of transports that "auto" may choose, so that a broken installation is
        not offered. A transport that the config names is loaded only when it is used.

        Raises:
            ResourceExhaustedError: the process has no free descriptor, thread or memory for the probes.
        """
        return tuple(
            Offer(
                name=spec.name,
                protocol=spec.protocol,
                capabilities=spec.capabilities,
                probe=self._probe(spec, load=load),
                auto=spec.auto,
            )
            for spec in self.pipes.values()
        )

    def _probe(self, spec: TransportSpec, *, load: bool) -> Probe:
        found = self._viable.get(spec.name) or spec.run_probe()
        if not found.viable:
            return found
        self._viable[spec.name] = found
        if load and spec.auto and spec.name != self.requested_transport:
            if reason := _why_broken(spec):
                return attrs.evolve(found, viable=False, reason=reason)
        return found

    def select(self, required: Requirements, *, load: bool = True) -> Selection:
        """Select the pipe transport that this end and a peer like it agree on. ``load``: see :meth:`offers`.

        Raises:
            HandshakeError: no transport fits.
        """
        offers = self.offers(load=load)
        return select(offers, offers, required, (self.requested_transport, AUTO))

    def explain_missing_pipe(self, device: str | None = None, *, load: bool = True) -> str | None:
        """Return why no pipe that the config allows can move tensors of ``device`` (default: the config's).

        Return ``None`` if one can. ``load``: see :meth:`offers`.
        """
        try:
            self.select(Requirements(device=device or self.config.device.partition(":")[0]), load=load)
        except HandshakeError as e:
            return "; ".join(e.reasons)
        return None

    def options_of(self, spec: Any) -> Any:
        """Return an instance of the spec's options class, filled from the config.

        Raises:
            ConfigError: the options are wrong; the error lists every fault.
        """
        return options_of(self.registry, spec, self.config.options)

    @functools.cached_property
    def credentials(self) -> Credentials:
        """The config's credentials; see :func:`credentials_of`."""
        return credentials_of(self.config)

    def context(self, spec: Any, **more: Any) -> Any:
        """Make the argument of the spec's factory: the config's values, the spec's options, and ``more``."""
        cls = MADE[spec.kind][0]
        names = {field.name for field in attrs.fields(cls)}
        given = {key: getattr(self.config, key) for key in names.intersection(KEYS)}
        if "credentials" in names:
            given["credentials"] = self.credentials
        return cls(**{**given, "options": self.options_of(spec), **more})

    def make(self, spec: Any, **more: Any) -> Any:
        """Call the spec's factory with its context.

        Raises:
            ConfigError, PluginError, ResourceExhaustedError.
        """
        return made(spec, self.context(spec, **more))

    def usable(self, kind: Literal[Kind.STORE, Kind.DIRECTORY], name: str) -> Any:
        """Return the spec of that name.

        Raises:
            UnknownNameError, AmbiguousNameError: no plugin offers the name, or two do.
            PluginError: its probe finds that it cannot work here.
        """
        spec = self.registry.get(kind, name)
        probe = spec.run_probe()
        if not probe.viable:
            raise PluginError(f"the {kind} {spec.name!r} cannot work here: {probe.reason}")
        return spec

    def able(self, kind: TransportKind, device: str) -> tuple[str, ...]:
        """Return the names that "auto" may choose for this kind, if all ends are on one host."""
        required = self._required(device)
        return tuple(spec.name for spec in self.registry.specs(kind) if not _against(spec, required))

    def _required(self, device: str, *, cross_host: bool = False) -> Requirements:
        device, authenticated = device.partition(":")[0], must_authenticate(self.config)
        return Requirements(device=device, cross_host=cross_host, authenticated=authenticated)

    def chosen(
        self,
        kind: TransportKind,
        device: str = "cpu",
        *,
        cross_host: bool = False,
        among: Collection[str] | None = None,
    ) -> TransportSpec:
        """Choose the transport of this kind that the config names.

        "auto" chooses the transport with the lowest latency among those that work here, authenticate their
        peers if they must, and, except for lookup buffers, move tensors of that device, between hosts if
        ``cross_host``. ``among``: the names that all other ends can use, too.

        Raises:
            UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
            PluginError: the named transport, or every transport, is unusable; the error lists every reason.
        """
        name = str(getattr(self.config, _KEY_OF[kind]))
        every = [spec for spec in self.registry.specs(kind) if spec.auto]
        specs: list[TransportSpec] = every if name == AUTO else [self.registry.get(kind, name)]
        required = self._required(device, cross_host=cross_host)
        reasons = {spec: _against(spec, required) for spec in specs}
        if name == AUTO and among is not None:
            for spec in specs:
                if spec.name not in among:
                    reasons[spec] = reasons[spec] or ("another rank cannot use it",)
        able = [spec for spec in specs if not reasons[spec]]
        for spec in sorted(able, key=lambda spec: (spec.capabilities.cost.latency_us, spec.name)):
            if name != AUTO or not (broken := _why_broken(spec)):
                return spec
            reasons[spec] = (broken,)
        missing = f"none is installed: pip install {listed(dict.fromkeys(PACKAGES[kind].values()))}"
        lines = [f"{spec.name}: {'; '.join(why)}" for spec, why in reasons.items()] or [missing]
        head = f"no {kind.replace('_', ' ')} is available:"
        raise PluginError("\n  - ".join([head, *lines, *self.registry.failures()]))

    def build(self, kind: TransportKind, device: str | None = None, **more: Any) -> Any:
        """Build an endpoint of the configured transport of a kind. ``device`` defaults to the config's.

        Raises:
            As :meth:`chosen` and :meth:`make`.
        """
        if kind is not Kind.QUEUE:
            more["device"] = self.config.device if device is None else device
        return self.make(self.chosen(kind, more.get("device", "cpu")), **more)

    def abilities(self) -> dict[str, Capabilities]:
        """Return the capabilities of the pipe transports, by name."""
        return {name: spec.capabilities for name, spec in self.pipes.items()}

    def pipe_endpoint(self, name: str, device: str) -> PipeEndpoint:
        """Build the endpoint of the agreed transport."""
        spec = self.pipes[name]
        try:
            endpoint: PipeEndpoint = self.make(spec, device=device)
        except PluginError as e:
            if self.config.transport == AUTO:
                _note_broken(spec, e)
            raise
        return endpoint

    @functools.cached_property
    def connector(self) -> ConnectorSpec | None:
        """The config's connector; ``None`` if its name has a fault, which :meth:`check` reports."""
        found: ConnectorSpec | None = self.registry.find(Kind.CONNECTOR, self.config.connector)
        return found

    @property
    def uses_stores(self) -> bool:
        """Whether the connector keeps pages in stores; true if the connector is unknown."""
        return self.connector is None or self.connector.moves_pages

    @property
    def device_of_links(self) -> str:
        """The device type of the tensors that links between engines with this config move."""
        moves_pages = self.connector is not None and self.connector.moves_pages
        return "cpu" if moves_pages else self.config.device.partition(":")[0]

    def sinks(self) -> tuple[Sink, ...]:
        """Make the sinks that the config names."""
        specs = [self.registry.get(Kind.SINK, name) for name in self.config.sinks]
        return tuple(made(spec, self.options_of(spec)) for spec in specs)

    def check(self, keys: Iterable[str] = (*CHOSEN, *NAMED, *CHECKED), more: Iterable[str] = ()) -> None:
        """Resolve the names in the config and check every table of options.

        ``keys``: the keys that the caller uses. ``more``: faults that the caller has found. The default of
        ``stores`` is checked only when a connector opens the stores.

        Raises:
            UnknownConnectorError, UnknownTransportError, AmbiguousNameError: the only fault is a name that is
                unknown or ambiguous; the error lists the known names.
            ConfigError: there are other or several faults; the error lists every fault.
        """
        config = self.config
        keys = frozenset(keys)
        names = {key: getattr(config, key) for key in {*keys, "thread_cpus"}}
        if config.stores == option_fields(Config)["stores"].default:
            names.pop("stores", None)
        faults = [*more, *name_faults(self.registry, names, config.options)]
        shortage = shortage_of(budgets_of(config, self.registry, keys))
        if shortage is not None and shortage.is_final:
            faults.append(f"{shortage.key}: {shortage.text}")
        elif shortage is not None and shortage.key not in _short:
            _short.add(shortage.key)
            text = f"{shortage.key}: {shortage.text}"
            LogEvent.MEMORY_SHORT.log(logger, text, error=text)
        if len(faults) == 1:
            for key in names.keys() & CHOSEN.keys():
                if names[key] != AUTO:
                    self.registry.get(CHOSEN[key], names[key])
        if faults:
            raise ConfigError(*faults, source=config.source)


_broken: Final[dict[tuple[str, str], str]] = {}
"""Why this process could not load or make a transport under "auto". A failed load does not succeed later, so
"auto" skips the transport until the process restarts."""


def _why_broken(spec: TransportSpec) -> str:
    """Load a transport. Return why it is broken, or an empty text if it loaded.

    Raises:
        ResourceExhaustedError: the process has no free descriptor or memory to load it.
    """
    if (spec.called, spec.factory) not in _broken:
        try:
            spec.load_factory()
        except PluginLoadError as e:
            _note_broken(spec, e)
    return _broken.get((spec.called, spec.factory), "")


def _note_broken(spec: TransportSpec, error: PluginError) -> None:
    key = (spec.called, spec.factory)
    if key not in _broken:
        _broken[key] = " ".join(str(error).split())
        LogEvent.TRANSPORT_BROKEN.log(
            logger,
            f"{spec.called} is broken, and 'auto' skips it from now on: {_broken[key]}; reinstall its"
            f" package, or name its plugin in KVPLUG_DISABLE_PLUGINS (`kvplug list {spec.name}` shows both)",
            transport=spec.name,
            error=_broken[key],
        )


def _ensure_config(config: object) -> None:
    if not isinstance(config, Config):
        made = "Config.from_dict" if isinstance(config, Mapping) else "Config.load"
        raise TypeError(f"config is a {type(config).__name__}, not a kvplug.Config; {made}(...) makes one")


def labels_of(config: Config, *, connector: str, side: str, rank: int) -> dict[str, str]:
    """Return the labels that name the source of metrics to a sink. A plain pipe's ``connector`` is empty."""
    return {
        "connector": connector,
        "side": side,
        "role": str(config.role or ""),
        "rank": str(rank),
        "engine_id": config.engine_id,
    }


def tls_of(config: Config) -> TlsFiles | None:
    """Return the config's TLS files, or ``None`` if it names none."""
    if config.tls_cert and config.tls_key and config.tls_ca:
        return TlsFiles(
            cert=config.tls_cert, key=config.tls_key, ca=config.tls_ca, check_host=config.tls_check_host
        )
    return None


def credentials_of(config: Config) -> Credentials:
    """Load the secret from the config's file or the environment, and the config's TLS files.

    Raises:
        ConfigError: one of the files cannot be used.
        InsecureAddressError: host or an element of peers is a TCP address, and neither a secret nor TLS is
            configured.
    """
    credentials = Credentials.load(secret_file=config.secret_file, tls=tls_of(config))
    check_addresses(credentials, config.host, config.peer_addresses)
    return credentials


def check_addresses(credentials: Credentials, host: str, peers: Iterable[str]) -> None:
    """Raise InsecureAddressError if a config's ``host`` or one of ``peers`` lacks a secret or TLS."""
    unix = host.startswith("unix:")
    credentials.mode_at(Address(name=host) if unix else Address(host, 0), "host")
    for peer in peers:
        credentials.mode_at(Address.parse_server(peer), "peers")


def is_exposed(config: Config) -> bool:
    """Whether other hosts can reach the config's ``host``."""
    return not config.host.startswith("unix:") and not Address(config.host).is_loopback


def must_authenticate(config: Config) -> bool:
    """Whether data planes must authenticate: other hosts can reach them, and the config does not exempt
    them."""
    return is_exposed(config) and not config.allow_unauthenticated_data_plane


def checksums_of(config: Config) -> tuple[str, ...]:
    """Return the hashes this end offers, preferred ones first; empty when integrity is off.

    An end that saves offers only the hash of its entries. An end that only loads offers every hash it can
    verify.
    """
    if config.integrity == "off":
        return ()
    if config.integrity != "auto":
        return (config.integrity,)
    return available() if config.role is Role.CONSUMER else available()[:1]


def make_hello(
    resolved: ResolvedConfig, engine: EngineFacts | None, moves_kv: bool, device: str, purpose: str
) -> Hello:
    """Make the Hello of this end; ``engine`` is ``None`` for a plain pipe."""
    config = resolved.config
    return Hello(
        purpose=purpose,
        moves_kv=moves_kv,
        engine=engine,
        engine_id=config.engine_id,
        epoch=EPOCH,
        require_authenticated=must_authenticate(config),
        checksums=checksums_of(config),
        integrity=config.integrity,
        transports=resolved.offers(load=moves_kv),
        requested_transport=resolved.requested_transport,
        device=device,
        identity=PeerIdentity.of_this_process(),
        versions={"kvplug": kvplug.__version__},
    )


def _against(spec: TransportSpec, required: Requirements) -> tuple[str, ...]:
    """Return the reasons against choosing this transport."""
    probe = spec.run_probe()
    lacks = () if spec.kind is Kind.LOOKUP_BUFFER else spec.capabilities.missing(required)
    return (*(() if probe.viable else (probe.reason,)), *lacks)
