"""Explains the decisions that a config leads to on this host. Nothing is opened, made or started."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Container, Iterator
from operator import itemgetter
from typing import Final

from kvplug.assembly.budgets import budgets_of, shortage_of
from kvplug.assembly.doctor.finding import Finding, from_fault, from_reasons, judged, note, ok, problem
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
from kvplug.config.config import Config, Role
from kvplug.config.messages import Fault
from kvplug.config.units import bytes_in_words
from kvplug.errors import ConfigError, HandshakeError, PluginError
from kvplug.negotiation.select import AUTO
from kvplug.net.memory.room import free_memory, machine_memory
from kvplug.net.trust.tls import TlsFiles, validity_of
from kvplug.transport.capabilities import Requirements
from kvplug.transport.spec import ConnectorSpec, Kind, StoreSpec, TransportSpec

_USUAL_FILE: Final = "kvplug.toml"
_DAY_S: Final = 86400
_EXPIRES_SOON_S: Final = 30 * _DAY_S


def explain(config: Config, registry: Registry) -> Iterator[Finding]:
    """Yield every fault and decision, in the order in which an engine meets them. ``kvplug config show``
    prints the values themselves."""
    resolved = ResolvedConfig(config, registry)
    names = {key: getattr(config, key) for key in (*CHOSEN, *NAMED, *CHECKED)}
    faults = name_faults(registry, names, config.options)
    faulty = {Fault.of(each).key for each in faults}
    yield from _sources(config)
    yield _plugins(registry)
    yield from map(from_fault, faults)
    if config.role is None:
        what = "nothing was given; set it to producer, consumer or both (KVPLUG_ROLE; vLLM's kv_role)"
        yield problem("role", what, change='role = "both"    (or "producer", "consumer")')
    yield from _trust(config)
    yield from _stores(resolved)
    yield from _memory(resolved)
    if "integrity" not in faulty:
        yield from _integrity(resolved)
    if not faulty & {"stores", "peers"}:
        yield from _announcement(resolved)
    if "transport" not in faulty:
        yield from _transports(resolved)
    yield from _parts(resolved, faulty)


def faults_of_file(error: ConfigError) -> Iterator[Finding]:
    """Yield the problems of a config that cannot be read."""
    source = error.source
    whole = f"{source or 'the configuration'}    (or another file: --config, KVPLUG_CONFIG)"
    for fault in map(Fault.of, error.faults):
        is_of_a_file = source and not fault.place.startswith(("KVPLUG_", "command line"))
        why = [f"in {source}"] if is_of_a_file else []
        yield problem("config", str(fault), *why, change=fault.line or whole)


def _sources(config: Config) -> Iterator[Finding]:
    given = sorted({source.partition(": ")[0] for source in config.sources.values()} - {config.source})
    places = ", ".join(filter(None, (config.source, *given)))
    yield ok("config", f"read from {places}" if places else "every value is a default")
    if not config.source and os.path.isfile(_USUAL_FILE):
        what = f"{_USUAL_FILE} in this folder is not read unless it is named"
        yield note(
            "config", what, change=f"kvplug ... {_USUAL_FILE}    (or export KVPLUG_CONFIG={_USUAL_FILE})"
        )


def _plugins(registry: Registry) -> Finding:
    failed = registry.failed
    text = f"{len(registry.plugins) - len(failed)} are loaded"
    if not failed:
        return ok("plugins", text)
    why = (f"{each.name} ({each}) is {each.status.value}: {each.reason}" for each in failed)
    change = "pip install --upgrade NAME    (or take NAME out of KVPLUG_DISABLE_PLUGINS)"
    return note("plugins", f"{text}, {len(failed)} not; their offers are missing", *why, change=change)


def _trust(config: Config) -> Iterator[Finding]:
    """Check who can reach the address of worker 0, and how the two ends authenticate each other."""
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
    if credentials.secret is not None:
        text = f"both ends prove that they know the secret, here from {secret_source(config)}"
    elif config.host.startswith("unix:"):
        text = "none is set or needed on one host: only processes of this user are accepted"
    else:
        text = "none is set: each end presents a certificate of the deployment's authority"
    yield ok("secret", text)
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
        # tls_ca may contain an old certificate beside the new one. In tls_cert, the first one counts.
        begins, ends = max(periods, key=itemgetter(1)) if key == "tls_ca" else periods[0]
        is_valid = begins <= now < ends
        when = f"it expires in {int((ends - now) // _DAY_S)} days" if is_valid else f"today is {_date(now)}"
        yield judged(
            key,
            f"{path} is valid from {_date(begins)} to {_date(ends)}; {when}",
            "outside these dates TLS connections fail, so nothing is loaded",
            change=f"{key} = PATH    (of a new certificate; it is read again when the file changes)",
            wrong=not is_valid,
            doubtful=ends - now < _EXPIRES_SOON_S,
        )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _stores(resolved: ResolvedConfig) -> Iterator[Finding]:
    for name in resolved.config.stores if resolved.uses_stores else ():
        spec: StoreSpec | None = resolved.registry.find(Kind.STORE, name)
        if spec is None:
            continue  # reported as a fault of its name
        probe, lives = spec.run_probe(), "outlives the engine" if spec.persistent else "ends with its process"
        yield judged(
            "stores",
            f"{_called(resolved, spec)}; it {lives}",
            f"it cannot work here: {probe.reason or 'its probe gives no reason'}",
            change="stores: names that `kvplug list --kind store` shows as ok",
            wrong=not probe.viable,
        )


def _called(resolved: ResolvedConfig, spec: ConnectorSpec | StoreSpec | TransportSpec) -> str:
    """Return a spec's name, plugin and summary."""
    owners = "".join(f" from {plugin}" for plugin in resolved.registry.owners(spec.kind, spec.name)[:1])
    return f"{spec.name}{owners}: {spec.summary}".rstrip(": ")


def _memory(resolved: ResolvedConfig) -> Iterator[Finding]:
    """Compare the memory budgets with this process's limit and with the free memory."""
    budgets = budgets_of(resolved.config, resolved.registry, frozenset((*CHOSEN, *NAMED)))
    if (shortage := shortage_of(budgets)) is not None:
        change = f'{shortage.key} = "SIZE"    (or a higher limit of memory)'
        yield problem(shortage.key, shortage.text, change=change)
    elif budgets:
        free, limit = bytes_in_words(free_memory()), bytes_in_words(machine_memory())
        total = bytes_in_words(sum(budgets.values()))
        yield ok("memory", f"up to {total} may be used ({', '.join(budgets)}); {free} of {limit} are free")


def _announcement(resolved: ResolvedConfig) -> Iterator[Finding]:
    """Check that other engines can reach the address that this engine announces in a directory."""
    config, first = resolved.config, None
    if config.stores and config.directory is not None and config.role is not Role.CONSUMER:
        first = resolved.registry.find(Kind.STORE, config.stores[0])
    if first is not None and first.client is not None and config.directory is not None:
        if fault := unreachable_contact(config.directory, config.control_address()):
            yield from_fault(fault)


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


def _transports(resolved: ResolvedConfig) -> Iterator[Finding]:
    """Explain which pipe carries tensors to a peer like this one, and why others were not chosen."""
    config, device = resolved.config, resolved.device_of_links
    for cross_host in (False, True) if is_exposed(config) else (False,):
        where = "another host" if cross_host else "this host"
        required = Requirements(device=device, cross_host=cross_host, authenticated=must_authenticate(config))
        try:
            chosen, *rest = resolved.select(required).candidates
        except HandshakeError as e:
            yield from from_reasons(e.reasons, f"a peer like this one on {where}")
        else:
            what = f"{device} tensors to a peer like this one on {where} go by {chosen}"
            yield ok("transport", what, *map(str, rest))


def _parts(resolved: ResolvedConfig, faulty: Container[str]) -> Iterator[Finding]:
    """Explain which connector, lookup buffer, queue and communicator an engine uses. ``faulty``: keys whose
    faults are listed already."""
    config, connector = resolved.config, resolved.connector
    if connector is not None:
        yield ok("connector", _called(resolved, connector))
    parts: list[tuple[TransportKind, str]] = [(Kind.QUEUE, "cpu"), (Kind.COMMUNICATOR, config.device)]
    if connector is not None and connector.uses_lookup_buffer:
        parts.insert(0, (Kind.LOOKUP_BUFFER, "cpu"))
    for kind, device in parts:
        key = kind.value
        if key in faulty:
            continue
        try:
            yield ok(key, _called(resolved, resolved.chosen(kind, device)))
        except PluginError as e:
            make = note if getattr(config, key) == AUTO else problem
            change = f"{key}: a name that `kvplug list --kind {key}` shows as ok"
            yield make(key, str(e), change=change)
