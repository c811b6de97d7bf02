"""Explains the decisions that a config leads to on this host. Nothing is opened, made or started."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Final

from kvplug.assembly.budgets import budgets_of, shortage_of
from kvplug.assembly.examination.finding import Finding, from_fault, note, ok, problem
from kvplug.assembly.host import secret_source
from kvplug.assembly.members import unreachable_contact
from kvplug.assembly.registry import Registry
from kvplug.assembly.registry.check import CHECKED, CHOSEN, NAMED, name_faults
from kvplug.assembly.resolve import (
    ResolvedConfig,
    TransportKind,
    checksums_of,
    credentials_of,
    is_exposed,
    must_authenticate,
    tls_of,
)
from kvplug.config.config import Config, Role, directory_of
from kvplug.config.messages import Fault
from kvplug.config.units import bytes_in_words
from kvplug.errors import ConfigError, HandshakeError, PluginError, Reason, WireError
from kvplug.negotiation.select import AUTO
from kvplug.net.memory.room import free_memory, machine_memory
from kvplug.net.trust.tls import TlsFiles, validity_of
from kvplug.transport.capabilities import Requirements
from kvplug.transport.spec import Kind

_USUAL_FILE: Final = "kvplug.toml"
_DAY_S: Final = 86400
_EXPIRES_SOON_S: Final = 30 * _DAY_S


def explain(config: Config, registry: Registry) -> tuple[Finding, ...]:
    """Return every decision, in the order in which an engine makes them."""
    resolved = ResolvedConfig(config, registry)
    names = {key: getattr(config, key) for key in (*CHOSEN, *NAMED, *CHECKED)}
    faults = name_faults(registry, names, config.options)
    found = [*_sources(config), _plugins(registry), *map(from_fault, faults)]
    for check in _CHECKS:
        if not (faults and check in _WITHOUT_FAULTS):
            found += check(resolved)
    return tuple(found)


def faults_of_file(error: ConfigError) -> tuple[Finding, ...]:
    """Return the problems of a config that cannot be read."""
    source = error.source
    whole = f"{source or 'the configuration'}    (or another file: --config, KVPLUG_CONFIG)"
    found = []
    for fault in map(Fault.of, error.faults):
        is_of_a_file = source and not fault.place.startswith(("KVPLUG_", "command line"))
        why = [f"in {source}"] if is_of_a_file else []
        found.append(problem("config", str(fault), *why, change=fault.line or whole))
    return tuple(found)


def _sources(config: Config) -> Iterator[Finding]:
    """Yield where the config was read, unless a program made it from its own values."""
    given = {source.partition(": ")[0] for source in config.sources.values()}
    variables = sorted(each for each in given if each.startswith("KVPLUG_"))
    if given - {*variables, "command line", config.source or "command line"}:
        return
    text = f"read from {config.source}" if config.source else "no file was read"
    text += f", and from {', '.join(variables)}" if variables else ""
    text += ", and from the command line" if "command line" in given else ""
    if config.source or not os.path.isfile(_USUAL_FILE):
        yield ok("config", text)
        return
    why = f"{_USUAL_FILE} in this folder is not read unless it is named: --config or KVPLUG_CONFIG"
    change = f"--config {_USUAL_FILE}    (or export KVPLUG_CONFIG={_USUAL_FILE})"
    yield note("config", text, why, change=change)


def _plugins(registry: Registry) -> Finding:
    failed = registry.failed
    text = f"{len(registry.plugins) - len(failed)} are loaded"
    if not failed:
        return ok("plugins", text)
    why = (f"{each.name} ({each}) is {each.status.value}: {each.reason}" for each in failed)
    change = "pip install --upgrade NAME    (or take NAME out of KVPLUG_DISABLE_PLUGINS)"
    return note("plugins", f"{text}, {len(failed)} not; their offers are missing", *why, change=change)


def _owner(registry: Registry, kind: Kind, name: str) -> str:
    return "".join(f" from {plugin}" for plugin in registry.owners(kind, name)[:1])


def _role(resolved: ResolvedConfig) -> Iterator[Finding]:
    role = resolved.config.role
    meaning = {
        Role.PRODUCER: "saves the KV that the engine computes, and lets peers load it",
        Role.CONSUMER: "loads KV from peers or stores; saves nothing",
        Role.BOTH: "saves the KV that the engine computes, and loads its own KV and that of peers and stores",
    }
    if role is None:
        what = "nothing was given; set it to producer, consumer or both (KVPLUG_ROLE; vLLM's kv_role)"
        yield problem("role", what, change='role = "both"    (or "producer", "consumer")')
    else:
        yield ok("role", f"{role}: {meaning[role]}")


def _connector(resolved: ResolvedConfig) -> Iterator[Finding]:
    if (spec := resolved.connector) is not None:
        owner = _owner(resolved.registry, Kind.CONNECTOR, spec.name)
        yield ok("connector", f"{spec.name}{owner}: {spec.summary or 'it has no summary'}")


def _address(resolved: ResolvedConfig) -> Iterator[Finding]:
    config = resolved.config
    verb = "dials" if config.role is Role.CONSUMER and not config.peers else "listens at"
    reach = "other hosts can reach it" if is_exposed(config) else "only processes of this host can reach it"
    yield ok("host", f"worker 0 {verb} {config.control_address()}: {reach}")
    files = tls_of(config)
    certificates = [] if files is None else [*of_certificates(files)]
    yield from certificates
    if any(each.topic == "tls" for each in certificates):
        return
    try:
        credentials = credentials_of(config)
    except ConfigError as e:
        change = "secret_file = PATH    (of a readable file with 16 bytes or more)"
        if not config.secret_file:
            change = "secret_file = PATH    (at both ends; `kvplug config secret PATH` makes one)"
        yield from (problem("secret", fault, change=change) for fault in e.faults)
        return
    tls = "connections over TCP use TLS 1.3"
    if credentials.secret is not None:
        text = f"both ends prove that they know the secret, here from {secret_source(config)}"
    elif config.host.startswith("unix:"):
        text = "no secret is set or needed on one host: only processes of this user are accepted"
    else:
        text = "no secret is set: each end presents a certificate of the deployment's authority"
    yield ok("secret", f"{text}; {tls}" if credentials.tls is not None else text)
    if config.secret_file and (mode := os.stat(config.secret_file).st_mode) & (stat.S_IRWXO | stat.S_IWGRP):
        what = f"secret_file {config.secret_file} is open to other users (mode {mode & 0o777:o})"
        yield note("secret_file", what, change="chmod 600 PATH    (of the file)")
    if config.secret_file and os.environ.get("KVPLUG_SECRET", "").strip():
        what = "KVPLUG_SECRET is set but not used: secret_file takes precedence"
        yield note("secret", what, change="unset KVPLUG_SECRET")


def of_certificates(files: TlsFiles) -> Iterator[Finding]:
    """Check that the TLS files can be used and that their certificates are valid."""
    try:
        files.for_listener()
    except ConfigError as e:
        change = "tls_cert, tls_key, tls_ca: PEM files; tls_key is the key of tls_cert"
        yield from (problem("tls", fault, change=change) for fault in e.faults)
        return
    now = time.time()
    for key, path in (("tls_cert", files.cert), ("tls_ca", files.ca)):
        if not (periods := validity_of(path)):
            continue
        # An authority file may hold an old certificate beside the new one; tls_cert begins with its own.
        begins, ends = max(periods, key=itemgetter(1)) if key == "tls_ca" else periods[0]
        what = f"{path} is valid from {_date(begins)} to {_date(ends)}"
        change = f"{key} = PATH    (of a new certificate; it is read again when the file changes)"
        if not begins <= now < ends:
            why = "TLS connections fail, so nothing is loaded"
            yield problem(key, f"{what}; today is {_date(now)}", why, change=change)
        elif ends - now < _EXPIRES_SOON_S:
            yield note(key, f"{what}; it expires in {int((ends - now) // _DAY_S)} days", change=change)
        else:
            yield ok(key, what)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _lookup_buffer(resolved: ResolvedConfig) -> Iterator[Finding]:
    config = resolved.config
    if resolved.connector is None or not resolved.connector.uses_lookup_buffer:
        return
    with contextlib.suppress(PluginError):  # a fault of its name
        spec = resolved.chosen(Kind.LOOKUP_BUFFER)[0]
        size = bytes_in_words(config.buffer_size)
        holds = f"holds up to {size} in each worker" if config.role is not Role.CONSUMER else "is the peer's"
        owner = _owner(resolved.registry, Kind.LOOKUP_BUFFER, spec.name)
        yield ok("lookup_buffer", f"{spec.name}{owner} {holds}: {spec.summary}")


def _stores(resolved: ResolvedConfig) -> Iterator[Finding]:
    for at, name in enumerate(resolved.config.stores if resolved.uses_stores else ()):
        if (spec := resolved.registry.find(Kind.STORE, name)) is None:
            continue  # a fault of its name
        probe, owner = spec.run_probe(), _owner(resolved.registry, Kind.STORE, name)
        if not probe.viable:
            what = f"{name}{owner} cannot work here: {probe.reason or 'its probe gives no reason'}"
            yield problem("stores", what, change="stores: names that `kvplug list --kind store` shows as ok")
            continue
        place = "saved into first" if not at else f"copied from the one before into tier {at + 1}"
        lives = "outlives the engine" if spec.persistent else "ends with its process"
        reach = "other hosts can use it" if spec.cross_host else "processes of this host can use it"
        yield ok("stores", f"{name}{owner}: pages are {place}; {lives}; {reach}")


def _memory(resolved: ResolvedConfig) -> Iterator[Finding]:
    budgets = budgets_of(resolved.config, resolved.registry, frozenset((*CHOSEN, *NAMED)))
    if (shortage := shortage_of(budgets)) is not None:
        change = f'{shortage.key} = "SIZE"    (or a higher limit of memory)'
        yield problem(shortage.key, shortage.text, change=change)
    elif budgets:
        free, limit = bytes_in_words(free_memory()), bytes_in_words(machine_memory())
        total = bytes_in_words(sum(budgets.values()))
        yield ok("memory", f"up to {total} may be used ({', '.join(budgets)}); {free} of {limit} are free")


def _peers(resolved: ResolvedConfig) -> Iterator[Finding]:
    config = resolved.config
    with contextlib.suppress(WireError):  # a fault of another key
        first = resolved.registry.find(Kind.STORE, config.stores[0]) if config.stores else None
        announces = first is not None and first.client is not None and config.role is not Role.CONSUMER
        if announces and config.directory is not None:
            if fault := unreachable_contact(config.directory, config.control_address()):
                yield from_fault(fault)
    for peer in config.peers:
        what = f"KV of the engine at {peer} is loaded: worker r dials the address of its worker r"
        if directory_of(peer) is not None:
            often = f"five times per {config.peers_lease_s:g} s"
            what = f"this engine announces itself in {peer} {often}, and loads from others that do"
        yield ok("peers", what)
    if not config.peers and config.role is Role.CONSUMER:
        yield ok("peers", f"none are named: KV of the engine at {config.host} is loaded")


def _weights(resolved: ResolvedConfig) -> Iterator[Finding]:
    weights = resolved.config.weights
    text = "not stated: restarts and peers can load KV where the engine finds a fingerprint of its weights"
    yield ok("weights", f"{weights!r}: engines that state the same load each other's KV" if weights else text)


def _load_policy(resolved: ResolvedConfig) -> Iterator[Finding]:
    """Explain when a connector with the option ``load_policy`` computes KV that it could load."""
    connector = resolved.connector
    if connector is not None and getattr(resolved.options_of(connector), "load_policy", "") == "auto":
        text = "auto: KV that takes much longer to load than to compute is computed (not_worth_it in metrics)"
        yield ok(f"options.{connector.name}.load_policy", text)


def _transports(resolved: ResolvedConfig) -> Iterator[Finding]:
    config, device = resolved.config, resolved.device_of_links
    for cross_host in (False, True) if is_exposed(config) else (False,):
        where = "another host" if cross_host else "this host"
        required = Requirements(device=device, cross_host=cross_host, authenticated=must_authenticate(config))
        try:
            found = resolved.select(required)
        except HandshakeError as e:
            head, *others = (each for each in e.reasons if isinstance(each, Reason))
            what = f"with a peer like this one on {where}: {head.what}"
            why = (each.removeprefix("transport ") for each in others)
            yield problem("transport", what, *why, change=f'transport = "auto"    ({head.change})')
        else:
            chosen, *rest = found.candidates
            what = f"{device} tensors to a peer like this one on {where} go by {chosen}"
            yield ok("transport", what, *map(str, rest))


def _between_workers(resolved: ResolvedConfig) -> Iterator[Finding]:
    """Explain what an engine uses to run one model in several workers (tensor parallelism)."""
    where = "in an engine with several workers"
    uses: tuple[tuple[TransportKind, str, str], ...] = (
        (Kind.QUEUE, "cpu", "the scheduler sends steps over"),
        (Kind.COMMUNICATOR, resolved.config.device, "the workers sum over"),
    )
    for kind, device, purpose in uses:
        key = kind.value
        try:
            spec, _ = resolved.chosen(kind, device)
        except PluginError as e:
            make = note if getattr(resolved.config, key) == AUTO else problem
            change = f"{key}: a name that `kvplug list --kind {key}` shows as ok"
            yield make(key, f"{where}, {e}", change=change)
        else:
            yield ok(key, f"{where}, {purpose} {spec.name}")


def _integrity(resolved: ResolvedConfig) -> Iterator[Finding]:
    config, connector = resolved.config, resolved.connector
    offered = checksums_of(config)
    if connector is not None and not connector.hashes_on_devices and not config.device.startswith("cpu"):
        what = f"{connector.name} does not hash KV on {config.device}: corruption in transit is not detected"
        yield note("integrity", what, change="connector: another one, if corruption must be detected")
    elif not offered:
        what = "off: corrupted KV is not detected, and gives wrong answers"
        yield note("integrity", what, change='integrity = "auto"')
    else:
        yield ok("integrity", f"KV is verified with {' or '.join(offered)}")


def _sinks(resolved: ResolvedConfig) -> Iterator[Finding]:
    if not resolved.config.sinks:
        change = 'sinks = ["log"]    (or names that `kvplug list --kind sink` shows)'
        yield note("sinks", "none: metrics are counted but not sent anywhere", change=change)
    for name in resolved.config.sinks:
        yield ok("sinks", f"metrics go to {name} every ten seconds")


def _timeouts(resolved: ResolvedConfig) -> Iterator[Finding]:
    config = resolved.config
    yield ok(
        "timeout_s",
        f"a call ends within {config.timeout_s:g} s, a peer may take {config.connect_timeout_s:g} s to start,"
        f" and one on another host that is silent for {config.heartbeat_timeout_s:g} s counts as dead",
    )


_CHECKS: Final[tuple[Callable[[ResolvedConfig], Iterable[Finding]], ...]] = (
    *(_role, _connector, _address, _lookup_buffer, _stores, _memory, _peers, _weights, _load_policy),
    *(_transports, _between_workers, _integrity, _sinks, _timeouts),
)
_WITHOUT_FAULTS: Final = (_load_policy, _transports, _between_workers)
"""The checks that need valid names and options."""
