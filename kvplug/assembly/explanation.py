"""What a config would do on this host, step by step, with reasons. Nothing is opened, made or started."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any, Final, Literal

import attrs

from kvplug.assembly.budgets import budgets_of, shortage_of
from kvplug.assembly.members import unreachable_contact
from kvplug.assembly.registry import PluginStatus, Registry
from kvplug.assembly.registry.check import CHECKED, CHOSEN, NAMED, name_faults
from kvplug.assembly.resolve import (
    ResolvedConfig,
    checksums_of,
    credentials_of,
    device_of_links,
    must_authenticate,
)
from kvplug.config import Config, Role
from kvplug.config.config import directory_of
from kvplug.config.messages import Fault
from kvplug.config.units import bytes_in_words
from kvplug.errors import ConfigError, HandshakeError, KvplugError, PluginError, WireError
from kvplug.negotiation.select import AUTO, select
from kvplug.net.memory.room import free_memory, machine_memory
from kvplug.net.trust.addresses import is_loopback
from kvplug.transport.capabilities import Requirements
from kvplug.transport.spec import ConnectorSpec, Kind

Verdict = Literal["ok", "note", "problem"]


@attrs.frozen(kw_only=True)
class Step:
    """One decision that the config leads to."""

    topic: str
    """The key, or the part of kvplug, that it is about."""
    verdict: Verdict
    """``"problem"``: with it nothing is built, or nothing moves."""
    text: str
    details: tuple[str, ...] = ()
    """What else was considered, and why not."""


def explain(config: Config, registry: Registry) -> tuple[Step, ...]:
    """Every step, in the order in which an engine takes them."""
    return tuple(_steps(config, ResolvedConfig(config, registry)))


def _steps(config: Config, resolved: ResolvedConfig) -> Iterator[Step]:
    yield from _sources(config)
    yield from _plugins(resolved.registry)
    names = {key: getattr(config, key) for key in (*CHOSEN, *NAMED, *CHECKED)}
    faults = name_faults(resolved.registry, names, config.options)
    for fault in faults:
        key, _, text = fault.partition(": ")
        yield Step(topic=key, verdict="problem", text=text)
    yield _role(config)
    connector = _connector(config, resolved)
    if connector is not None:
        yield Step(
            topic="connector",
            verdict="ok",
            text=f"{connector.name}{_owner(resolved.registry, Kind.CONNECTOR, connector.name)}:"
            f" {connector.summary or 'it has no summary'}",
        )
    yield from _address(config)
    if connector is not None and connector.uses_lookup_buffer:
        yield from _lookup_buffer(config, resolved)
    if resolved.uses_stores and (config.role is not Role.CONSUMER or config.stores):
        yield from _stores(config, resolved)
    yield from _memory(config, resolved)
    yield from _peers(config, resolved)
    yield _weights(config)
    if connector is not None and not faults:
        yield from _load_policy(connector, resolved)
    if not faults:
        yield from _transports(config, resolved, connector)
        yield from _between_workers(resolved)
    yield _integrity(config, connector)
    yield from _sinks(config)
    yield _times(config)


_USUAL_FILE: Final = "kvplug.toml"


def _sources(config: Config) -> Iterator[Step]:
    """Where the config was read; nothing of one that a program made from its own values."""
    given = {source.partition(": ")[0] for source in config.sources.values()}
    variables = sorted(each for each in given if each.startswith("KVPLUG_"))
    if given - {*variables, "command line", config.source or "command line"}:
        return
    text = f"read from {config.source}" if config.source else "no file was read"
    text += f", and from {', '.join(variables)}" if variables else ""
    text += ", and from the command line" if "command line" in given else ""
    is_passed_over = not config.source and os.path.isfile(_USUAL_FILE)
    details = (f"{_USUAL_FILE} in this folder is not read unless it is named: --config or KVPLUG_CONFIG",)
    yield Step(
        topic="config",
        verdict="note" if is_passed_over else "ok",
        text=text,
        details=details if is_passed_over else (),
    )


def _plugins(registry: Registry) -> Iterator[Step]:
    failed = [each for each in registry.plugins if each.status is not PluginStatus.OK]
    text = f"{len(registry.plugins) - len(failed)} are loaded"
    if failed:
        text += f", {len(failed)} not; what they offer is missing"
    details = tuple(f"{each.name} ({each}) is {each.status.value}: {each.reason}" for each in failed)
    yield Step(topic="plugins", verdict="note" if failed else "ok", text=text, details=details)


def _owner(registry: Registry, kind: Kind, name: str) -> str:
    return "".join(f" from {plugin}" for plugin in registry.owners(kind, name)[:1])


def _role(config: Config) -> Step:
    meaning = {
        Role.PRODUCER: "saves the KV that the engine computes, and lets peers load it",
        Role.CONSUMER: "loads KV that peers, or stores, have; saves nothing",
        Role.BOTH: "saves the KV that the engine computes, and loads what it, peers or stores have",
    }
    if config.role is None:
        return Step(
            topic="role",
            verdict="problem",
            text="nothing was given; set it to producer, consumer or both (KVPLUG_ROLE; vLLM's kv_role)",
        )
    return Step(topic="role", verdict="ok", text=f"{config.role}: {meaning[config.role]}")


def _connector(config: Config, resolved: ResolvedConfig) -> ConnectorSpec | None:
    try:
        return resolved.registry.get(Kind.CONNECTOR, config.connector)
    except PluginError:
        return None  # a fault of its name


def _address(config: Config) -> Iterator[Step]:
    try:
        address = config.control_address()
    except ConfigError as e:
        yield Step(topic="host", verdict="problem", text="; ".join(e.faults))
        return
    verb = "dials" if config.role is Role.CONSUMER and not config.peers else "listens at"
    one_host = config.host.startswith("unix:") or is_loopback(config.host)
    reach = "only processes of this host reach it" if one_host else "other hosts reach it"
    yield Step(topic="host", verdict="ok", text=f"worker 0 {verb} {address}: {reach}")
    try:
        credentials = credentials_of(config)
    except ConfigError as e:
        for fault in e.faults:
            topic = "tls" if fault.startswith("tls_") else "secret"
            yield Step(topic=topic, verdict="problem", text=fault)
        return
    parts = ["both ends prove that they know the secret" if credentials.secret else "there is no secret"]
    if credentials.secret is None and config.host.startswith("unix:"):
        parts.append("none is needed on one host: only processes of the same user get in")
    if credentials.tls is not None:
        parts.append("connections over TCP use TLS 1.3")
    yield Step(topic="secret", verdict="ok", text="; ".join(parts))
    if config.secret_file and (mode := os.stat(config.secret_file).st_mode) & (stat.S_IRWXO | stat.S_IWGRP):
        text = f"secret_file {config.secret_file} is open to other users (mode {mode & 0o777:o})"
        yield Step(topic="secret_file", verdict="note", text=text)
    if config.secret_file and os.environ.get("KVPLUG_SECRET", "").strip():
        text = "KVPLUG_SECRET is set too, and not used: secret_file goes before it"
        yield Step(topic="secret", verdict="note", text=text)


def _stores(config: Config, resolved: ResolvedConfig) -> Iterator[Step]:
    for at, name in enumerate(config.stores):
        try:
            spec = resolved.registry.get(Kind.STORE, name)
        except PluginError:
            continue  # a fault of its name
        place = "saved into first" if not at else f"copied from the one before into tier {at + 1}"
        words = ["outlives the engine" if spec.persistent else "ends with its process"]
        words.append("other hosts can use it" if spec.cross_host else "processes of this host can use it")
        probe = spec.run_probe()
        owner = _owner(resolved.registry, Kind.STORE, name)
        if probe.viable:
            text = f"{name}{owner}: pages are {place}; {'; '.join(words)}"
            yield Step(topic="stores", verdict="ok", text=text)
        else:
            why = probe.reason or "its probe gives no reason"
            yield Step(topic="stores", verdict="problem", text=f"{name}{owner} cannot work here: {why}")


def _lookup_buffer(config: Config, resolved: ResolvedConfig) -> Iterator[Step]:
    with contextlib.suppress(PluginError):  # a fault of its name
        spec = resolved.chosen(Kind.LOOKUP_BUFFER)[0]
        size = bytes_in_words(config.buffer_size)
        holds = f"holds up to {size} in each worker" if config.role is not Role.CONSUMER else "is the peer's"
        owner = _owner(resolved.registry, Kind.LOOKUP_BUFFER, spec.name)
        yield Step(topic="lookup_buffer", verdict="ok", text=f"{spec.name}{owner} {holds}: {spec.summary}")


def _memory(config: Config, resolved: ResolvedConfig) -> Iterator[Step]:
    budgets = budgets_of(config, resolved.registry, frozenset((*CHOSEN, *NAMED)))
    if (shortage := shortage_of(budgets)) is not None:
        yield Step(topic=shortage.key, verdict="problem", text=shortage.text)
    elif budgets:
        text = f"up to {bytes_in_words(sum(budgets.values()))} may be taken ({', '.join(budgets)})"
        free, limit = bytes_in_words(free_memory()), bytes_in_words(machine_memory())
        yield Step(topic="memory", verdict="ok", text=f"{text}; {free} of {limit} are free")


def _peers(config: Config, resolved: ResolvedConfig) -> Iterator[Step]:
    with contextlib.suppress(PluginError, ConfigError, WireError):  # faults of other keys
        first = resolved.registry.get(Kind.STORE, config.stores[0]) if config.stores else None
        announces = first is not None and first.client is not None and config.role is not Role.CONSUMER
        if announces and config.directory is not None:
            if fault := unreachable_contact(config.directory, config.control_address()):
                yield Step(topic="host", verdict="problem", text=fault.removeprefix("host: "))
    for peer in config.peers:
        directory = directory_of(peer)
        if directory is None:
            text = f"KV of the engine at {peer} is loaded: worker r dials the address of its worker r"
        else:
            text = (
                f"this engine announces itself in {directory} five times per {config.peers_lease_s:g} s, and"
                " loads from the engines that do so as well"
            )
        yield Step(topic="peers", verdict="ok", text=text)
    if not config.peers and config.role is Role.CONSUMER:
        text = f"none named: KV of the engine at {config.host} is loaded"
        yield Step(topic="peers", verdict="ok", text=text)


def _weights(config: Config) -> Step:
    if config.weights:
        text = (
            f"stated as {config.weights!r}: restarts, and engines that state the same, load each other's KV;"
            " no others do"
        )
    else:
        text = (
            "not stated: restarts and peers can load KV where the engine finds a fingerprint of its weights"
            " (in safetensors files). Where it finds none, it warns, and its KV is its own until it ends"
        )
    return Step(topic="weights", verdict="ok", text=text)


def _load_policy(connector: ConnectorSpec, resolved: ResolvedConfig) -> Iterator[Step]:
    """When a connector with that option computes what it could load."""
    policy = getattr(resolved.options_of(connector), "load_policy", "")
    if policy == "auto":
        text = "auto: KV that takes much longer to load than to compute is computed (not_worth_it in metrics)"
        yield Step(topic=f"options.{connector.name}.load_policy", verdict="ok", text=text)


def _transports(config: Config, resolved: ResolvedConfig, connector: ConnectorSpec | None) -> Iterator[Step]:
    device = "cpu" if connector is None else device_of_links(config, connector)
    one_host = config.host.startswith("unix:") or is_loopback(config.host)
    offers = resolved.offers()
    for cross_host in (False,) if one_host else (False, True):
        where = "another host" if cross_host else "this host"
        required = Requirements(device=device, cross_host=cross_host, authenticated=must_authenticate(config))
        requested = resolved.requested_transport
        try:
            found = select(offers, offers, required, (requested, AUTO))
        except HandshakeError as e:
            head, *reasons = e.reasons
            yield Step(
                topic="transport",
                verdict="problem",
                text=f"with a peer like this one on {where}: {head.removeprefix('transport: ')}",
                details=tuple(map(_of_one_end, reasons)),
            )
        else:
            chosen, *others = found.candidates
            yield Step(
                topic="transport",
                verdict="ok",
                text=f"{device} tensors to a peer like this one on {where} go by {chosen}",
                details=tuple(_of_one_end(str(each)) for each in others),
            )


def _between_workers(resolved: ResolvedConfig) -> Iterator[Step]:
    """What an engine uses that runs one model in several workers (tensor parallelism)."""
    where = "in an engine with several workers"
    for key, purpose in (
        ("queue", "the scheduler sends steps by"),
        ("communicator", "the workers add up by"),
    ):
        try:
            if key == "queue":
                spec, _ = resolved.chosen(Kind.QUEUE)
            else:
                spec, _ = resolved.chosen(Kind.COMMUNICATOR, resolved.config.device)
        except PluginError as e:
            text, *details = str(e).split("\n  - ")
            verdict: Verdict = "note" if getattr(resolved.config, key) == AUTO else "problem"
            yield Step(topic=key, verdict=verdict, text=f"{where}, {text}", details=tuple(details))
        else:
            yield Step(topic=key, verdict="ok", text=f"{where}, {purpose} {spec.name}")


def _of_one_end(reason: str) -> str:
    """Without what it says of the peer, which is like this end."""
    parts = reason.split("; ")
    return "; ".join(part for part in parts if not part.startswith("cannot work at the peer"))


def _integrity(config: Config, connector: ConnectorSpec | None) -> Step:
    offered = checksums_of(config)
    if connector is not None and not connector.hashes_on_devices and not config.device.startswith("cpu"):
        text = f"{connector.name} does not hash KV on {config.device}: corruption on its way is not noticed"
        return Step(topic="integrity", verdict="note", text=text)
    if not offered:
        text = "off: corrupted KV is not noticed, and gives wrong answers"
        return Step(topic="integrity", verdict="note", text=text)
    return Step(topic="integrity", verdict="ok", text=f"KV is verified with {' or '.join(offered)}")


def _sinks(config: Config) -> Iterator[Step]:
    if not config.sinks:
        yield Step(
            topic="sinks", verdict="note", text="none: metrics are counted and go nowhere by themselves"
        )
    for name in config.sinks:
        yield Step(topic="sinks", verdict="ok", text=f"metrics go to {name} every ten seconds")


def _times(config: Config) -> Step:
    text = (
        f"a call ends within {config.timeout_s:g} s, a peer may take {config.connect_timeout_s:g} s to start,"
        f" and one on another host that is silent for {config.heartbeat_timeout_s:g} s counts as dead"
    )
    return Step(topic="timeout_s", verdict="ok", text=text)


def problems_of(error: KvplugError) -> tuple[Step, ...]:
    """The steps of a config that cannot even be read."""
    return tuple(
        Step(topic="config", verdict="problem", text=str(fault), details=source_of(fault, error))
        for fault in faults_of(error)
    )


def faults_of(error: KvplugError) -> tuple[Fault, ...]:
    """The faults of a config that an error says."""
    faults: tuple[Any, ...] = getattr(error, "faults", ()) or (str(error),)
    return tuple(Fault.of(fault if isinstance(fault, str) else str(fault)) for fault in faults)


def source_of(fault: Fault, error: KvplugError) -> tuple[str, ...]:
    """Where a fault was read, if it was read from a file."""
    source = getattr(error, "source", "")
    is_of_a_file = not fault.place.startswith(("KVPLUG_", "command line"))
    return (f"in {source}",) if source and is_of_a_file else ()
