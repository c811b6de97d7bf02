"""The configuration of one process: its values, checked, and the source of each value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from kvplug.config import sources
from kvplug.config.addresses import DEFAULT_HOST, LAST_PORT
from kvplug.config.messages import Fault, in_place_of, nearest, unknown_key
from kvplug.config.options import OptionRow, convert_values, describe_options, option, option_fields
from kvplug.config.role import Role, role_of
from kvplug.config.schema import (
    chosen,
    count,
    cpus_form,
    cross_faults,
    device_form,
    directory_of,
    each_one,
    engine_id_form,
    host_form,
    integrity_form,
    name_form,
    option_tables,
    peer_form,
    weights_form,
)
from kvplug.config.sources import Layer, SourcedValue
from kvplug.errors import ConfigError

DEFAULT_PORT = 29555


def _heartbeat(config: Config) -> float:
    timeout: Any = config.timeout_s  # not checked yet
    return min(10.0, timeout) if isinstance(timeout, (int, float)) else 10.0


@attrs.frozen(kw_only=True)
class Config:
    """A configuration. Made by ``from_dict``, ``from_toml``, ``from_json``, ``from_env`` or ``load``.

    Precedence, highest first: command line, environment, file, default. Only form is checked here; that
    a name exists, and a plugin's options, are checked where the plugins are known.

    >>> config = Config.from_dict({"role": "producer", "timeout_s": "500 ms"})
    >>> config.timeout_s
    0.5
    >>> Config.from_dict({"transprot": "cpu"})
    Traceback (most recent call last):
        ...
    kvplug.errors.ConfigError: bad configuration: transprot: not a known key; did you mean 'transport'?
    """

    connector: str = option(
        "lookup", help="The connector. It decides which KV moves, and when.", validator=chosen
    )
    transport: str = option(
        "auto",
        help='The pipe transport that carries tensors. "auto": the fastest one that both ends have.',
        validator=name_form,
    )
    queue: str = option(
        "auto", help='The message queue transport. "auto": the fastest that works here.', validator=name_form
    )
    lookup_buffer: str = option(
        "auto",
        help='The lookup buffer, which stores KV entries and finds them. "auto": the fastest installed one.',
        validator=name_form,
    )
    communicator: str = option(
        "auto", help='The device communicator. "auto": the fastest that works here.', validator=name_form
    )
    stores: tuple[str, ...] = option(
        ("host",),
        help="Stores that keep KV page by page, the fastest first. Pages are saved into the first one and"
        " copied to the others; a page is loaded from the first one that has it.",
        validator=each_one(name_form),
    )
    peers: tuple[str, ...] = option(
        (),
        help="The engines whose KV is loaded. Addresses: host:port or unix:@name of rank 0 of each, or the"
        " contact of a program. Or the URL of a directory where engines announce themselves, such as"
        " redis://10.0.0.7:6379/0 or etcd://10.0.0.7:2379. None given: the one at host and port, for a"
        " consumer.",
        validator=each_one(peer_form),
    )
    peers_lease_s: float = option(
        15.0,
        help="With a directory in peers: how long an engine counts as there after its last announcement. Each"
        " announces itself, and reads the others' announcements, five times as often.",
        unit="seconds",
        at_least=0.5,
    )
    role: Role | None = attrs.field(
        default=None,
        converter=role_of,
        metadata={"kvplug.help": "Whether this process produces KV, consumes it, or both. Must be set."},
    )
    host: str = option(
        DEFAULT_HOST,
        help="Address to listen at or to dial: unix:@name for an abstract Unix socket, which this user's"
        " processes on this host reach; unix:/path for one in the file system, for containers; or, for other"
        " hosts, a host, which needs a secret (`kvplug config secret` makes one) or TLS. To the name of a"
        " Unix socket the number of the rank is appended. Give each deployment on a host a name of its own.",
        validator=host_form,
    )
    port: int = option(
        DEFAULT_PORT,
        help="First port, where host is no Unix socket: rank r listens at port + port_offset + r.",
        at_least=1,
        at_most=LAST_PORT,
        validator=count("a port number"),
    )
    port_offset: int = option(
        0,
        help="Added to port, or to the number after the name of a Unix socket. Give each deployment with the"
        " same host and port an offset of its own.",
        at_least=0,
        at_most=LAST_PORT,
        validator=count("a whole number"),
    )
    timeout_s: float = option(
        30.0, help="Deadline of every call that is given no timeout.", unit="seconds", above=0
    )
    connect_timeout_s: float = option(
        60.0,
        help="How long to wait for a peer to start. Raise it where engines take long to load.",
        unit="seconds",
        above=0,
    )
    heartbeat_timeout_s: float = option(
        attrs.Factory(_heartbeat, takes_self=True),
        help="A peer on another host that is silent for this long counts as dead. Lower notices a death"
        " sooner; higher tolerates longer pauses. At most timeout_s. Default: 10 s, or timeout_s if less.",
        unit="seconds",
        above=0,
    )
    queue_warning_interval_s: float = option(
        60.0,
        help="A queue call that waits logs a warning each time it has waited this long.",
        unit="seconds",
        above=0,
    )
    device: str = option(
        "cpu",
        help="Device of the KV that moves: cpu, cuda, cuda:1.",
        validator=device_form,
    )
    thread_cpus: str = option(
        "all",
        help='CPUs of kvplug\'s threads, in the whole process: "all" that the program may use, "inherit"'
        ' those of the thread that starts them, or a list such as "0-3,8".',
        validator=cpus_form,
    )
    buffer_size: int = option(
        2**30,
        help="Bytes of KV that a lookup buffer may hold. Higher keeps more entries and takes more memory.",
        unit="bytes",
        at_least=1,
        validator=count("a size"),
    )
    staging_size: int = option(
        2**28,
        help="Bytes of pinned host memory through which pages of caches on a GPU are copied. It is made when"
        " the first such cache is registered.",
        unit="bytes",
        at_least=2**20,
        validator=count("a size"),
    )
    max_message_bytes: int | None = option(
        None,
        help="Largest message, or entry of a lookup buffer, for which kvplug takes memory. If a peer"
        " announces a larger one, receiving it fails at once. None: what the process can have.",
        unit="bytes",
        at_least=1,
    )
    engine_id: str = option(
        attrs.Factory(lambda: os.urandom(16).hex()),
        help="Name of this engine for its peers. Must differ from theirs. Default: random.",
        validator=engine_id_form,
    )
    weights: str = option(
        "",
        help="Identity of the model's weights. Engines with the same one share KV, so give each set of"
        " weights its own, such as a name with a revision. Default: the fingerprint that the engine finds in"
        " its files; where it finds none, one of its own for each start, which nothing shares.",
        validator=weights_form,
    )
    doctor: Literal["off", "look", "measure"] = option(
        "measure",
        help="What `kvplug doctor` at a peer is told here. look: this host's limits and versions. measure: it"
        " may also move up to 64 MiB in a second. off: only what every handshake says.",
        validator=attrs.validators.in_(("off", "look", "measure")),
    )
    failure_policy: Literal["fail", "recompute"] = option(
        "recompute",
        help="What happens to a request whose KV failed to load: recompute the KV, or fail the request.",
        validator=attrs.validators.in_(("fail", "recompute")),
    )
    integrity: str = option(
        "auto",
        help='Hash that detects corrupted KV. "auto": a fast one that both ends have. "off": none. Else the'
        " name of a hash.",
        validator=integrity_form,
    )
    slow_path: Literal["warn", "refuse", "off"] = option(
        "warn",
        help="What is done about a pipe that carries less than a tenth of what its transport claims, or than"
        " a fifth of what it did before, and about a store that gives or takes less than a twentieth of what"
        " it did before: a warning, once; the end of the pipe, with SlowPathError, and misses for a minute;"
        " nothing.",
        validator=attrs.validators.in_(("warn", "refuse", "off")),
    )
    sinks: tuple[str, ...] = option(
        (),
        help="Where metrics go every ten seconds: log, prometheus, or a sink of a plugin.",
        validator=each_one(name_form),
    )
    secret_file: str | None = option(
        None, help="File with the secret that both ends share. Takes precedence over KVPLUG_SECRET."
    )
    tls_cert: str | None = option(
        None,
        help="PEM file with this process's certificate, then those between it and tls_ca. Turns on TLS 1.3"
        " for connections over TCP. Needs tls_key and tls_ca.",
    )
    tls_key: str | None = option(None, help="PEM file with the private key of tls_cert, not encrypted.")
    tls_ca: str | None = option(
        None,
        help="PEM file with the certificate of the deployment's own authority. Both ends' certificates must"
        " be signed by it.",
    )
    tls_check_host: bool = option(
        True,
        help="Whether the certificate of a listener must name the host that was dialled. Switch it off where"
        " addresses change; any certificate of tls_ca is accepted then.",
    )
    allow_unauthenticated_data_plane: bool = option(
        False,
        help="Permit transports that cannot authenticate their peers (NCCL, gloo) at addresses that other"
        " hosts can reach.",
    )
    options: Mapping[str, Mapping[str, Any]] = attrs.field(
        factory=dict,
        converter=option_tables,
        metadata={"kvplug.help": "One table of options for each name: [options.cpu]."},
    )
    sources: Mapping[str, str] = attrs.field(factory=dict, repr=False, eq=False)
    """The source of each value that is not a default. Not a key."""
    source: str = attrs.field(default="", repr=False, eq=False)
    """The file or other source that was read, for messages. Not a key."""

    def __attrs_post_init__(self) -> None:
        faults = cross_faults({key: getattr(self, key) for key in KEYS})
        if faults:
            raise ConfigError(*faults, source=self.source)

    # -- made from what an operator wrote -------------------------------------------------------

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "") -> Config:
        """From kvplug's keys, or those of vLLM's ``--kv-transfer-config``.

        Raises:
            ConfigError: every fault of form at once. So do the other makers.
        """
        return Draft.of([sources.from_mapping(data, source)]).config()

    @classmethod
    def from_toml(cls, document: str | os.PathLike[str]) -> Config:
        """From a path, or from the document itself (text with a ``=`` in it).

        A path with a ``=`` in it is handed over as a ``pathlib.Path``.
        """
        if isinstance(document, str) and ("=" in document or "\n" in document):
            return Draft.of([sources.from_toml_text(document, "")]).config()
        text = sources.read_text(document)
        return Draft.of([sources.from_toml_text(text, os.fspath(document))]).config()

    @classmethod
    def from_json(cls, document: str | os.PathLike[str]) -> Config:
        """From a path, or from the document itself (text that starts with ``{``)."""
        if isinstance(document, str) and document.lstrip()[:1] in ("{", "["):
            return Draft.of([sources.from_json_text(document, "")]).config()
        text = sources.read_text(document)
        return Draft.of([sources.from_json_text(text, os.fspath(document))]).config()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """From the variables ``KVPLUG_<KEY>`` and ``KVPLUG_OPTIONS__<NAME>__<OPTION>`` alone."""
        return Draft.of([sources.from_environment(_environment(environ), KEYS)]).config()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """From all sources: ``overrides`` before the environment before the file before defaults.

        Args:
            path: a ``.toml`` or ``.json`` file; ``None`` takes the one ``KVPLUG_CONFIG`` names, if any.
            overrides: a dict, or texts ``"key=value"`` (``"options.cpu.connections=2"``).
        """
        return Draft.load(path, overrides=overrides, environ=environ).config()

    # -- questions ------------------------------------------------------------------------------

    def require_role(self) -> Role:
        """The role.

        Raises:
            ConfigError: none is set, and how to set one.
        """
        if self.role is None:
            raise ConfigError(
                f"role: nothing was given; allowed is one of {', '.join(Role)}"
                " (in the file, by KVPLUG_ROLE, or kv_role in vLLM's)",
                source=self.source,
            )
        return self.role

    def control_address(self, rank: int = 0) -> str:
        """Where worker ``rank`` listens: ``host:port``, ``unix:@name-number`` or ``unix:/path-number``.

        Raises:
            ConfigError: that port would be beyond the last one.
        """
        number = self.port_offset + rank
        if self.host.startswith("unix:"):
            return f"{self.host}-{number}"
        port = self.port + number
        if port > LAST_PORT:
            raise ConfigError(f"rank {rank} would listen at port {port}; the last one is {LAST_PORT}")
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @staticmethod
    def address_beside(peer: str, rank: int) -> str:
        """The address of worker ``rank`` of the engine whose worker 0 listens at ``peer``.

        >>> Config.address_beside("10.0.0.5:29555", 2), Config.address_beside("unix:@decode-0", 2)
        ('10.0.0.5:29557', 'unix:@decode-2')

        Raises:
            ConfigError: it names a single process, by a contact, and another rank is asked for.
        """
        if not rank:
            return peer
        head, separator, number = peer.rpartition("-" if peer.startswith("unix:") else ":")
        if not separator or not number.isdecimal():
            raise ConfigError(
                f"peers: {peer} names one process, and worker {rank} is looked for too; give host:port or"
                " unix:@name-0 or unix:/path-0 of worker 0"
            )
        return f"{head}{separator}{int(number) + rank}"

    @property
    def directory(self) -> str | None:
        """The directory of engines that ``peers`` names; ``None``: only addresses."""
        return next((peer for peer in self.peers if directory_of(peer) is not None), None)

    @property
    def peer_addresses(self) -> tuple[str, ...]:
        """``peers`` without a directory."""
        return tuple(peer for peer in self.peers if directory_of(peer) is None)

    def source_of(self, key: str) -> str:
        """Source of the value of ``key`` (also ``options.cpu.connections``); ``"default"`` if none set it."""
        return self.sources.get(key, "generated" if key == "engine_id" else "default")


KEYS: tuple[str, ...] = tuple(
    key for key in option_fields(Config) if key not in ("sources", "source", "options")
)
"""Every key of a configuration, but ``options``."""


def describe_config() -> tuple[OptionRow, ...]:
    """Every key, for documents and the command line."""
    return tuple(row for row in describe_options(Config) if row.name in KEYS)


def _environment(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ


@attrs.frozen(kw_only=True)
class Draft:
    """A configuration that may have faults: its valid values, and its faults."""

    values: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, str]
    source: str
    faults: tuple[Fault, ...]

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Draft:
        """As :meth:`Config.load`. Raises only when the file cannot be read as what it is."""
        environment = _environment(environ)
        path = path if path is not None else environment.get("KVPLUG_CONFIG") or None
        stack = [sources.from_file(path)] if path is not None else []
        stack.append(sources.from_environment(environment, KEYS))
        if overrides:
            stack.append(sources.from_overrides(overrides))
        return cls.of(stack)

    @classmethod
    def of(cls, stack: Iterable[Layer]) -> Draft:
        """Later sources lie on top of earlier ones, key by key."""
        given: dict[str, SourcedValue] = {}
        faults: list[Fault] = []
        names = []
        for layer in stack:
            names.append(layer.source)
            given.update(layer.values)
            faults += layer.faults
        flat: dict[str, Any] = {}
        options: dict[str, dict[str, Any]] = {}
        for key, each in given.items():
            if key.startswith("options."):
                fault = sources.put_option(options, key, each.value)
            elif key in KEYS:
                flat[key] = each.value
                fault = None
            else:
                fault = sources.secret_fault(key) or _unknown(key, each.value)
            if fault is not None:
                faults.append(fault.at(each.spelled))
        values, wrong = _converted(flat, given)
        faults += wrong
        complete = {
            key: values[key] if key in values else _default_of(key, values)
            for key in KEYS
            if key in values or key not in flat
        }
        faults += map(Fault.of, cross_faults(complete))
        return cls(
            values=values,
            options=options,
            sources={key: each.source for key, each in given.items()},
            source=", ".join(name for name in names if name not in ("", "environment", "command line")),
            faults=tuple(faults),
        )

    def config(self) -> Config:
        """Raises ConfigError with every fault, if there are any."""
        if self.faults:
            raise ConfigError(*self.faults, source=self.source)
        return Config(**self.values, options=self.options, sources=self.sources, source=self.source)


def _converted(
    flat: Mapping[str, Any], given: Mapping[str, SourcedValue]
) -> tuple[dict[str, Any], list[Fault]]:
    """Convert key by key, so that each fault names the source of its value."""
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for key, raw in flat.items():
        if key == "role":
            try:
                values[key] = role_of(raw)
            except ConfigError as e:
                faults += (Fault.of(fault).at(given[key].spelled) for fault in e.faults)
            continue
        converted, wrong = convert_values(Config, {key: raw})
        values |= converted
        faults += (fault.at(given[key].spelled) for fault in wrong)
    return values, faults


def _unknown(key: str, value: Any) -> Fault:
    if isinstance(value, Mapping) and nearest(key, (*KEYS, "options")) is None:
        text = (
            f"{key}: not a known key; a plugin's options are a table [options.{key}], and kvplug's own keys"
            " stand above all tables"
        )
        return Fault(text, key=key, line=in_place_of(key, f"[options.{key}]"))
    return unknown_key(key, (*KEYS, "options"))


def _default_of(key: str, values: Mapping[str, Any]) -> Any:
    if key == "heartbeat_timeout_s":
        return None  # follows timeout_s
    default = option_fields(Config)[key].default
    return "" if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
