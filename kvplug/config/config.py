"""The configuration of one process: its values, checked, and the source of each value."""

from __future__ import annotations

import enum
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from kvplug.config import sources
from kvplug.config.addresses import (
    DEFAULT_HOST,
    LAST_PORT,
    MAX_UNIX_BYTES,
    Address,
    check_host,
    check_unix_path,
)
from kvplug.config.messages import Fault
from kvplug.config.options import (
    HELP,
    option,
    option_fields,
    schema_fields,
    structured,
)
from kvplug.config.sources import Layer
from kvplug.errors import ConfigError

DEFAULT_PORT = 29555
TLS_KEYS = ("tls_cert", "tls_key", "tls_ca")
"""The keys that turn on TLS. All of them must be set, or none."""
_MAX_HOST_BYTES: Final = 89
"""The longest name or path of a Unix socket as ``host``, to which numbers and suffixes are appended."""
_CPU = "[0-9]{1,5}(?:-[0-9]{1,5})?"
_DIRECTORY_URL = re.compile(r"([a-z][a-z0-9-]{0,39})://(\S+)")
"""The URL of a directory of engines: the directory's name, and the rest, which the directory interprets."""
DEVICE: Final = re.compile("[a-z][a-z_]*(?::[0-9]{1,4})?")
_A_NAME = 'a name as `kvplug list` shows it, or "distribution:name"'


class Role(enum.StrEnum):
    """The role of this process in moving KV. vLLM's names, such as ``kv_producer``, are accepted too."""

    PRODUCER = "producer"
    """Computes KV that others load (prefill)."""
    CONSUMER = "consumer"
    """Loads KV that others computed (decode)."""
    BOTH = "both"
    """Does both; also the role of a single engine that keeps its own KV."""

    @property
    def produces(self) -> bool:
        """Whether this process offers KV to others."""
        return self is not Role.CONSUMER

    @property
    def consumes(self) -> bool:
        """Whether this process loads KV from others."""
        return self is not Role.PRODUCER

    @classmethod
    def _missing_(cls, value: object) -> Role | None:
        if isinstance(value, str) and value.startswith("kv_"):
            return {str(role): role for role in cls}.get(value.removeprefix("kv_"))
        return None


# -- the form of values ------------------------------------------------------------------------------


def _matches(pattern: str | re.Pattern[str], allowed: str) -> Callable[[Any, Any, Any], None]:
    def check(_: Any, __: Any, value: Any) -> None:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"allowed is {allowed}")

    return check


_engine_id_form = _matches(r"[\x21-\x7e]{1,200}", "up to 200 printable characters without white space")
_weights_form = _matches(r"[\x20-\x7e]{0,200}", "up to 200 printable characters")
_exporter_form = _matches("(?:[a-z][a-z0-9_.-]{0,63})?", "the name of an exporter, such as otlp_proto_http")
_integrity_form = _matches("[a-z][a-z0-9_]{0,31}", '"auto", "off" or the name of a hash')
_device_form = _matches(DEVICE, 'a device such as "cpu", "cuda" or "cuda:1"')
_name_form = _matches(r"(?:[A-Za-z0-9][\w.-]*:)?[a-z][a-z0-9-]{0,39}", _A_NAME)


def _chosen(_: Any, __: Any, value: Any) -> None:
    if value == "auto":
        raise ValueError(f"allowed is {_A_NAME}; a connector is not chosen automatically")
    _name_form(None, None, value)


def _host_form(_: Any, __: Any, value: Any) -> None:
    if value.startswith("unix:/"):
        check_unix_path(value.removeprefix("unix:"), _MAX_HOST_BYTES)
    elif value.startswith("unix:"):
        name = value.removeprefix("unix:@")
        if name == value or ":" in name or not name:
            raise ValueError("a Unix socket is written unix:@name, or unix:/path for one in the file system")
        Address.parse(f"{value}{'-' * (MAX_UNIX_BYTES - _MAX_HOST_BYTES)}")
    elif "://" in value or re.fullmatch(r"[^:]+:[0-9]+|\[.*\].*", value):
        raise ValueError("allowed is a host alone, without scheme, brackets or port; the port is set by port")
    else:
        check_host(value)


def _each_one(check_one: Any) -> Any:
    """Return the check of a list: each element passes ``check_one``, and no element is repeated."""

    def check(instance: Any, attribute: Any, values: Any) -> None:
        faults: list[str] = []
        for value in values:
            try:
                check_one(instance, attribute, value)
            except ConfigError as e:
                faults += e.faults
        if faults:
            raise ConfigError(*faults)
        if len(set(values)) != len(values):
            raise ValueError("each may be given only once")

    return check


def _peer_form(_: Any, __: Any, value: Any) -> None:
    if directory_of(value) is not None:
        return
    if "://" in value:
        raise ValueError('a directory of engines is written as a URL, such as "redis://10.0.0.7:6379/0"')
    address = Address.parse_server(value)
    if not address.is_unix and address.host in ("0.0.0.0", "::"):  # noqa: S104 - it is refused
        raise ConfigError(f"{value!r} is not a peer: {address.host} means every interface of a host")


def _cpus_form(_: Any, __: Any, value: Any) -> None:
    if not re.fullmatch(rf"all|inherit|{_CPU}(?:,{_CPU})*", value):
        raise ValueError('allowed is "all", "inherit", or a list of CPUs such as "0-3,8"')
    for first, last in re.findall(r"(\d+)-(\d+)", value):
        if int(first) > int(last):
            raise ValueError(f"the range {first}-{last} has no CPU; write the lower end first")


def directory_of(peer: str) -> str | None:
    """Return the name of the directory in an element of ``peers``, or ``None`` if it is an address."""
    found = _DIRECTORY_URL.fullmatch(peer)
    return None if found is None else found[1]


def _option_tables(value: Any) -> Mapping[str, Mapping[str, Any]]:
    return {str(name): dict(table) for name, table in value.items()}


def _cross_faults(values: Mapping[str, Any]) -> list[str]:
    """Return the faults of combinations of keys. Keys missing from ``values`` have faults of their own."""
    faults = []
    port, offset, host = values.get("port"), values.get("port_offset"), values.get("host", "")
    if port is not None and offset is not None and not host.startswith("unix:"):
        first = port + offset
        if first > LAST_PORT:
            faults.append(
                f"port: {port} was given; with port_offset {offset} rank 0 would listen at {first}, but a"
                f" port is at most {LAST_PORT}"
            )
    heartbeat, timeout = values.get("heartbeat_timeout_s"), values.get("timeout_s")
    if heartbeat is not None and timeout is not None and heartbeat > timeout:
        faults.append(
            f"heartbeat_timeout_s: {heartbeat:g} was given; allowed is at most timeout_s ({timeout:g}), or"
            " calls would give up before the death of a peer is noticed"
        )
    directories = [peer for peer in values.get("peers", ()) if directory_of(peer)]
    if len(directories) > 1:
        faults.append(f"peers: {len(directories)} directories were given; allowed is one, besides addresses")
    missing = [key for key in TLS_KEYS if not values.get(key)]
    given = [key for key in TLS_KEYS if key not in missing]
    if given and missing:
        faults.append(f"{missing[0]}: nothing was given; TLS needs it, since {given[0]} is set")
    if given and host.startswith("unix:") and not values.get("peers"):
        faults.append(
            f"{given[0]}: a file was given, and host is {host!r}; TLS is for TCP, and a Unix socket does not"
            " leave the host: remove one of the two"
        )
    return faults


def _heartbeat(config: Config) -> float:
    timeout: Any = config.timeout_s  # not checked yet
    return min(10.0, timeout) if isinstance(timeout, (int, float)) else 10.0


@attrs.frozen(kw_only=True)
class Config:
    """A configuration, made by ``from_dict`` or ``load``.

    Precedence, highest first: command line, environment, file, default. This class checks only the form of
    values. Names and plugins' options are checked once the plugins are known.

    >>> config = Config.from_dict({"role": "producer", "timeout_s": "500 ms"})
    >>> config.timeout_s
    0.5
    >>> Config.from_dict({"transprot": "cpu"})
    Traceback (most recent call last):
        ...
    kvplug.errors.ConfigError: bad configuration: transprot: not a known key; did you mean 'transport'?
    """

    connector: str = option(
        "lookup", help="The connector. It decides which KV moves, and when.", validator=_chosen
    )
    transport: str = option(
        "auto",
        help='The pipe transport that carries tensors. "auto": the fastest one that both ends have.',
        validator=_name_form,
    )
    queue: str = option(
        "auto", help='The message queue transport. "auto": the fastest that works here.', validator=_name_form
    )
    lookup_buffer: str = option(
        "auto",
        help='The lookup buffer, which stores KV entries and finds them. "auto": the fastest installed one.',
        validator=_name_form,
    )
    communicator: str = option(
        "auto",
        help='The device communicator. "auto": the fastest that works between the hosts of the ranks.',
        validator=_name_form,
    )
    stores: tuple[str, ...] = option(
        ("host",),
        help="Stores that keep KV page by page, the fastest first. Pages are saved into the first one and"
        " copied to the others; a page is loaded from the first one that has it.",
        validator=_each_one(_name_form),
    )
    peers: tuple[str, ...] = option(
        (),
        help="The engines whose KV this engine loads. Give the address of rank 0 of each (host:port or"
        " unix:@name), the contact of a program, or the URL of a directory where engines announce themselves,"
        " such as redis://10.0.0.7:6379/0 or etcd://10.0.0.7:2379. Without peers, a consumer loads from the"
        " engine at host and port.",
        validator=_each_one(_peer_form),
    )
    peers_lease_s: float = option(
        15.0,
        help="With a directory in peers: an engine is forgotten this long after its last announcement. Each"
        " engine announces itself, and reads the other announcements, five times in this period.",
        unit="seconds",
        at_least=0.5,
    )
    role: Role | None = option(  # noqa: RUF009 - option() returns a field
        None, help="Whether this process produces KV, consumes it, or both. Must be set."
    )
    host: str = option(
        DEFAULT_HOST,
        help="Address to listen at or to dial. unix:@name: an abstract Unix socket, which only this user's"
        " processes on this host can reach. unix:/path: a Unix socket in the file system, for containers. A"
        " host name or number: TCP, for other hosts; this needs a secret (`kvplug config secret` makes one)"
        " or TLS. The number of the rank is appended to the name of a Unix socket. Each deployment on a host"
        " needs another name.",
        validator=_host_form,
    )
    port: int = option(
        DEFAULT_PORT,
        help="The port of rank 0, if host is a TCP address: rank r listens at port + port_offset + r.",
        at_least=1,
        at_most=LAST_PORT,
    )
    port_offset: int = option(
        0,
        help="Added to port, or to the number after the name of a Unix socket. Deployments with the same host"
        " and port need different offsets.",
        at_least=0,
        at_most=LAST_PORT,
    )
    timeout_s: float = option(
        30.0, help="The timeout of every call that does not set one.", unit="seconds", above=0
    )
    connect_timeout_s: float = option(
        60.0,
        help="How long to wait for a peer to start. Raise it if engines take longer to load.",
        unit="seconds",
        above=0,
    )
    heartbeat_timeout_s: float = option(
        attrs.Factory(_heartbeat, takes_self=True),
        help="A peer on another host that is silent for this long counts as dead. A lower value detects a"
        " death sooner; a higher value tolerates longer pauses. At most timeout_s. Default: 10 s, or"
        " timeout_s if that is less.",
        unit="seconds",
        above=0,
    )
    device: str = option(
        "cpu",
        help="The device that holds this engine's KV: cpu, cuda or, for example, cuda:1.",
        validator=_device_form,
    )
    thread_cpus: str = option(
        "all",
        help='The CPUs that all threads of kvplug in the process may use. "all": every CPU that the program'
        ' may use. "inherit": the CPUs of the thread that starts them. Or a list such as "0-3,8".',
        validator=_cpus_form,
    )
    buffer_size: int = option(
        2**30,
        help="Bytes of KV that a lookup buffer may hold.",
        unit="bytes",
        at_least=1,
    )
    staging_size: int = option(
        2**28,
        help="Bytes of pinned host memory through which pages of caches on a GPU are copied. It is allocated"
        " when the first such cache is registered.",
        unit="bytes",
        at_least=2**20,
    )
    max_message_bytes: int | None = option(
        None,
        help="The largest message, or entry of a lookup buffer, for which kvplug allocates memory. Receiving"
        " a larger one fails as soon as the peer announces it. None: as much as the process can have.",
        unit="bytes",
        at_least=1,
    )
    engine_id: str = option(
        attrs.Factory(lambda: os.urandom(16).hex()),
        help="The name of this engine. It must differ from the names of its peers. Default: random.",
        validator=_engine_id_form,
    )
    weights: str = option(
        "",
        help="Identity of the model's weights, such as a name with a revision. Engines with equal identities"
        " share KV, so different weights need different identities. Default: a fingerprint of the files that"
        " the engine loads. If that is not possible, each start gets a new identity and shares no KV.",
        validator=_weights_form,
    )
    doctor: Literal["off", "look", "measure"] = option(
        "measure",
        help="What `kvplug doctor` and `kvplug top` at a peer may learn from this host. look: its limits,"
        " versions, links, requests and counters."
        " measure: also the rate of a pipe, by moving up to 64 MiB in a second. off: only the facts of every"
        " handshake.",
    )
    integrity: str = option(
        "auto",
        help='The hash that detects corrupted KV: a name, "auto" for a fast one that both ends have, or "off"'
        " for none.",
        validator=_integrity_form,
    )
    slow_path: Literal["warn", "refuse", "off"] = option(
        "warn",
        help="What to do about slow paths. A pipe is slow below a tenth of the rate that its transport"
        " claims, or below a fifth of its earlier rate; a store below a twentieth of its earlier rate. warn:"
        " log one warning. refuse: end the pipe with SlowPathError, and let requests to the store miss for a"
        " minute. off: do not compare rates.",
    )
    sinks: tuple[str, ...] = option(
        (),
        help="Where metrics go every ten seconds: log, prometheus, or a sink of a plugin.",
        validator=_each_one(_name_form),
    )
    tracing: str = option(
        "",
        help="The exporter of OpenTelemetry that receives a trace of each request, such as otlp_proto_http."
        " Its usual environment variables configure it. Needs kvplug[otel]. Default: nothing is exported.",
        validator=_exporter_form,
    )
    secret_file: str | None = option(
        None, help="File with the secret that both ends share. Takes precedence over KVPLUG_SECRET."
    )
    tls_cert: str | None = option(
        None,
        help="PEM file with this process's certificate, followed by the intermediate certificates up to"
        " tls_ca. Turns on TLS 1.3 for connections over TCP. Needs tls_key and tls_ca.",
    )
    tls_key: str | None = option(None, help="PEM file with the unencrypted private key of tls_cert.")
    tls_ca: str | None = option(
        None,
        help="PEM file with the certificate of the deployment's own authority. Both ends' certificates must"
        " be signed by it.",
    )
    tls_check_host: bool = option(
        True,
        help="Whether the certificate of a listener must contain the host that was dialled. If addresses"
        " change, switch this off; then any certificate of tls_ca is accepted.",
    )
    allow_unauthenticated_data_plane: bool = option(
        False,
        help="Permit transports that cannot authenticate their peers (NCCL, Mooncake) at addresses that"
        " other hosts can reach.",
    )
    options: Mapping[str, Mapping[str, Any]] = attrs.field(
        factory=dict,
        converter=_option_tables,
        metadata={HELP: "One table of options for each name: [options.cpu]."},
    )
    sources: Mapping[str, str] = attrs.field(factory=dict, repr=False, eq=False)
    """The source of each value that is not a default. Not a config key."""
    source: str = attrs.field(default="", repr=False, eq=False)
    """The file or other source that was read, for messages. Not a config key."""

    def __attrs_post_init__(self) -> None:
        faults = _cross_faults({key: getattr(self, key) for key in KEYS})
        if faults:
            raise ConfigError(*faults, source=self.source)

    # -- reading ---------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "") -> Config:
        """Make a Config from kvplug's keys, or those of vLLM's ``--kv-transfer-config``.

        Raises:
            ConfigError: some keys or values are invalid; it lists every fault.
        """
        return Draft.of([sources.from_mapping(data, source)]).config()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """Make a Config from all sources. Precedence: ``overrides``, environment, file, defaults.

        Args:
            path: a ``.toml`` or ``.json`` file; ``None`` takes the file that ``KVPLUG_CONFIG`` names, if any.
            overrides: a dict, or strings ``"key=value"`` (``"options.cpu.connections=2"``).

        Raises:
            ConfigError: the file cannot be read, or some keys or values are invalid; it lists every fault.
        """
        return Draft.load(path, overrides=overrides, environ=environ).config()

    # -- queries --------------------------------------------------------------------------------

    def require_role(self) -> Role:
        """Return the role.

        Raises:
            ConfigError: no role is set; the message explains how to set one.
        """
        if self.role is None:
            raise ConfigError(
                f"role: nothing was given; allowed is one of {', '.join(Role)}"
                " (in the file, by KVPLUG_ROLE, or kv_role in vLLM's)",
                source=self.source,
            )
        return self.role

    def control_address(self, rank: int = 0) -> str:
        """Return the address where worker ``rank`` listens: ``host:port``, ``unix:@name-number`` or
        ``unix:/path-number``.

        Raises:
            ConfigError: the port would exceed 65535.
        """
        number = self.port_offset + rank
        if self.host.startswith("unix:"):
            return f"{self.host}-{number}"
        port = self.port + number
        if port > LAST_PORT:
            raise ConfigError(f"rank {rank} would listen at port {port}, but a port is at most {LAST_PORT}")
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @staticmethod
    def address_beside(peer: str, rank: int) -> str:
        """Return the address of worker ``rank`` of the engine whose worker 0 listens at ``peer``.

        >>> Config.address_beside("10.0.0.5:29555", 2), Config.address_beside("unix:@decode-0", 2)
        ('10.0.0.5:29557', 'unix:@decode-2')

        Raises:
            ConfigError: ``peer`` is the contact of a single process, and ``rank`` is not 0.
        """
        if not rank:
            return peer
        head, separator, number = peer.rpartition("-" if peer.startswith("unix:") else ":")
        if not separator or not number.isdecimal():
            raise ConfigError(
                f"peers: {peer} names one process, but worker {rank} is needed too; give host:port or"
                " unix:@name-0 or unix:/path-0 of worker 0"
            )
        return f"{head}{separator}{int(number) + rank}"

    @property
    def directory(self) -> str | None:
        """The URL of the directory of engines in ``peers``, or ``None`` if ``peers`` has only addresses."""
        return next((peer for peer in self.peers if directory_of(peer) is not None), None)

    @property
    def peer_addresses(self) -> tuple[str, ...]:
        """The addresses in ``peers``, without the directory."""
        return tuple(peer for peer in self.peers if directory_of(peer) is None)

    def source_of(self, key: str) -> str:
        """Return the source of the value of ``key``, such as ``port`` or ``options.cpu.connections``.

        It is ``"default"`` if no source sets the key.
        """
        return self.sources.get(key, "generated" if key == "engine_id" else "default")


KEYS: tuple[str, ...] = tuple(
    key for key in option_fields(Config) if key not in ("sources", "source", "options")
)
"""Every key of a configuration except ``options``."""


def json_schema(options: Mapping[str, Sequence[type]]) -> dict[str, Any]:
    """Return the JSON schema of a configuration. ``options``: the options classes of each name."""
    import msgspec  # imported late: `kvplug list` needs no schema

    table = functools.partial(msgspec.defstruct, kw_only=True, forbid_unknown_fields=True)
    tables = [
        (
            name.replace("-", "_"),
            table(f"options.{name}", schema_fields(*classes).values()),
            msgspec.field(name=name, default_factory=object),
        )
        for name, classes in options.items()
    ]
    keys = schema_fields(Config)
    fields = [keys[key] for key in KEYS]
    fields.append(("options", table("options", tables), msgspec.field(default_factory=object)))
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return dialect | msgspec.json.schema(table("configuration", fields))


@attrs.frozen(kw_only=True)
class Draft:
    """A configuration that may have faults: its valid values and its faults."""

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
        """Read all sources like :meth:`Config.load`. Raise ConfigError only if the file cannot be parsed."""
        environ = os.environ if environ is None else environ
        path = path if path is not None else environ.get("KVPLUG_CONFIG") or None
        layers = [sources.from_file(path)] if path is not None else []
        layers.append(sources.from_environment(environ, KEYS))
        if overrides:
            layers.append(sources.from_overrides(overrides))
        return cls.of(layers)

    @classmethod
    def of(cls, layers: Iterable[Layer]) -> Draft:
        """Combine sources. Later ones override earlier ones."""
        layers = tuple(layers)
        files = [layer.source for layer in layers if layer.source not in ("", "environment", "command line")]
        given = {key: each for layer in layers for key, each in layer.values.items()}
        faults = [fault for layer in layers for fault in layer.faults]
        values: dict[str, Any] = {}
        options: dict[str, dict[str, Any]] = {}
        for key, (value, source) in given.items():
            wrong: tuple[Fault, ...]
            if key in KEYS:
                found, wrong = structured(Config, key, value)
                values |= {} if wrong else {key: found}
            elif key.startswith("options."):
                wrong = sources.put_option(options, key, value)
            else:
                wrong = (sources.unknown(key, value, (*KEYS, "options"), given),)
            place = "" if source in files else source.rpartition(": ")[2]
            faults += (fault.at(place) for fault in wrong)
        defaults = {key: _plain_default(key) for key in KEYS if key not in given}
        faults += map(Fault.of, _cross_faults({**defaults, **values}))
        return cls(
            values=values,
            options=options,
            sources={key: source for key, (_, source) in given.items()},
            source=", ".join(files),
            faults=tuple(faults),
        )

    def config(self) -> Config:
        """Make the Config. Raise ConfigError with every fault if there are any."""
        if self.faults:
            raise ConfigError(*self.faults, source=self.source)
        return Config(**self.values, options=self.options, sources=self.sources, source=self.source)


def _plain_default(key: str) -> Any:
    """Return the default of a key, or ``None`` if the default is computed."""
    default = option_fields(Config)[key].default
    return None if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
