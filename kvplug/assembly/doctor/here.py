"""What is looked at on this host alone: the config's steps, limits, the address, and a pipe to itself."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Final

import attrs

from kvplug.assembly.doctor.peer import PeerExamination, examine_peer
from kvplug.assembly.doctor.unreachable import line_for_resource
from kvplug.assembly.examination.finding import Finding, line_for_transport
from kvplug.assembly.examination.host import HostFacts
from kvplug.assembly.examination.limits import findings_of_host
from kvplug.assembly.explanation import Step, explain
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.peers import CONTROL, ControlPeers
from kvplug.assembly.resolve import ResolvedConfig, credentials_of
from kvplug.config import Config, Role
from kvplug.errors import (
    AddressInUseError,
    ClosedError,
    ConfigError,
    KvplugError,
    ResourceExhaustedError,
    TransportError,
)
from kvplug.net.affinity import choose_cpus
from kvplug.net.deadline import Deadline
from kvplug.net.trust.listener import Listener

_CHANGES: Final = {
    "role": 'role = "both"    (or "producer", "consumer")',
    "connector": "connector: a name that `kvplug list --kind connector` shows",
    "stores": "stores: names that `kvplug list --kind store` shows",
    "buffer_size": 'buffer_size = "SIZE"    (or a higher limit of memory)',
    "staging_size": 'staging_size = "SIZE"    (or a higher limit of memory)',
    "transport": 'transport = "auto"    (or a name that `kvplug list --kind pipe` shows as ok)',
    "host": "host: an address of this host; see `interfaces`",
    "secret": "export KVPLUG_SECRET=...    (the same at both ends; or secret_file = PATH)",
    "tls": "tls_cert, tls_key, tls_ca: PEM files; tls_key is the key of tls_cert",
    "integrity": 'integrity = "auto"',
    "sinks": "sinks: names that `kvplug list --kind sink` shows",
    "peers": "peers: addresses HOST:PORT of engines, or one directory that `kvplug list` shows",
    "plugins": "pip install --upgrade NAME    (or take NAME out of KVPLUG_DISABLE_PLUGINS)",
}
_INSTALL: Final = re.compile(r"pip install kvplug-[a-z-]+$", re.MULTILINE)
"""In the error of an unknown name, where its package is known."""


_NOTED: Final = {
    "config": "--config kvplug.toml    (or export KVPLUG_CONFIG=kvplug.toml)",
    "secret": "unset KVPLUG_SECRET",
    "secret_file": "chmod 600 PATH    (of the file)",
    "integrity": _CHANGES["integrity"],
    "plugins": _CHANGES["plugins"],
}
"""The lines to change of steps that are only notes."""


def from_step(step: Step) -> Finding:
    """A step of ``kvplug explain`` as a finding."""
    change = ""
    if step.verdict != "ok":
        change = _change_for(step) if step.verdict == "problem" else _NOTED.get(step.topic, "")
    return Finding(topic=step.topic, verdict=step.verdict, what=step.text, why=step.details, change=change)


def _change_for(step: Step) -> str:
    if missing := _INSTALL.search(step.text):
        return missing[0]
    if step.topic.startswith("options."):
        return f"{step.topic}    (`kvplug list --options {step.topic.split('.')[1]}` shows what there is)"
    if step.topic == "secret" and step.text.startswith("secret_file"):
        return "secret_file = PATH    (of a readable file with 16 bytes or more)"
    line = _CHANGES.get(step.topic, step.topic)
    return line_for_transport(step.text, line) if step.topic == "transport" else line


def of_config(resolved: ResolvedConfig) -> Iterator[Finding]:
    """The steps of ``kvplug explain``, and what it does not try."""
    yield from map(from_step, explain(resolved.config, resolved.registry))
    try:
        choose_cpus(resolved.config.thread_cpus)
    except ConfigError as e:
        yield Finding(
            topic="thread_cpus", verdict="problem", what="; ".join(e.faults), change='thread_cpus = "all"'
        )


def of_device(config: Config) -> Iterator[Finding]:
    """Whether PyTorch knows the config's device here. Makes no tensor: that would take memory of a GPU."""
    kind, _, index = config.device.partition(":")
    if kind != "cuda":
        return
    try:
        import torch
    except ImportError:
        yield Finding(topic="device", verdict="note", what="not looked for: PyTorch is not installed here")
        return
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        yield Finding(
            topic="device",
            verdict="problem",
            what=f"there is no {config.device} here: PyTorch {torch.__version__} finds {count} GPUs",
            why=("the GPU is not given to this container, or PyTorch was built without CUDA",),
            change='docker run --gpus=all    (or device = "cpu")',
        )
    else:
        yield Finding(topic="device", verdict="ok", what=f"PyTorch finds {count} GPUs")


def of_host(facts: HostFacts, config: Config) -> Iterator[Finding]:
    """This host's limits, and what it has."""
    yield from findings_of_host(facts, config)
    source = facts.secret or "none"
    yield Finding(
        topic="secret",
        verdict="ok",
        what=f"source of the secret: {source}; TLS is {'on' if facts.tls else 'off'}",
    )
    shown = "; ".join(f"{name} {addresses}" for name, addresses in facts.interfaces.items() if addresses)
    yield Finding(topic="interfaces", verdict="ok", what=shown or "none has an address")
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    yield Finding(topic="versions", verdict="ok", what=versions)


def of_address(config: Config, facts: HostFacts) -> Iterator[Finding]:
    """Whether worker 0 can listen where the config says; it listens there for a moment."""
    if config.role is Role.CONSUMER:
        return  # it dials
    try:
        credentials, address = credentials_of(config), config.control_address()
    except ConfigError:
        return  # a finding of the config
    try:
        Listener.open(address, credentials, CONTROL).close()
    except AddressInUseError as e:
        yield Finding(
            topic="host",
            verdict="note",
            what=str(e),
            why=("if that is the engine of this config, all is well: `--peer` examines it",),
            change="port_offset = 100    (for a second engine on this host)",
        )
    except (ConfigError, TransportError) as e:
        has = ", ".join(filter(None, facts.interfaces.values()))
        yield Finding(
            topic="host",
            verdict="problem",
            what="; ".join(e.faults) if isinstance(e, ConfigError) else str(e),
            why=(f"the interfaces of this network namespace have {has or 'no addresses'}",),
            change=f"host = {_suggested(facts)!r}",
        )
    else:
        yield Finding(topic="host", verdict="ok", what=f"worker 0 can listen at {address}")


def _suggested(facts: HostFacts) -> str:
    """An address of this host that others may reach; loopback where there is no other."""
    every = [each for addresses in facts.interfaces.values() for each in addresses.split(", ") if each]
    for each in every:
        number = ipaddress.ip_address(each.partition("%")[0])
        if not (number.is_loopback or number.is_link_local):
            return each
    return "127.0.0.1"


def of_own_pipe(resolved: ResolvedConfig, device: str, deadline: Deadline) -> PeerExamination:
    """A handshake with a listener of this process, and the pipe that peers like this one would take."""
    config = resolved.config
    settings = LinkSettings(resolved=resolved)
    address = "unix:" if config.host.startswith("unix:") else _with_port(config.host)
    peers = ControlPeers(settings, listen=address)
    try:
        server = peers.serve(_refuse, ControlLink.close)
        found = examine_peer(resolved, server.contact, device, {}, deadline, own=True)
    except ResourceExhaustedError as e:
        found = PeerExamination(contact="this host")
        what = f"no pipe within this host: {e}"
        found.findings.append(
            Finding(topic=e.resource, verdict="problem", what=what, change=line_for_resource(e.resource))
        )
    except KvplugError as e:
        found = PeerExamination(contact="this host")
        found.findings.append(
            Finding(
                topic="pipe",
                verdict="problem",
                what=f"no pipe within this host: {e}",
                change='transport = "auto"',
            )
        )
    finally:
        peers.close()
    found.findings = [
        attrs.evolve(each, what=f"within this host: {each.what}") if each.verdict == "problem" else each
        for each in found.findings
        if each.verdict == "problem" or each.topic not in ("handshake", "transport")
    ]
    if any(each.topic == "peer" for each in found.findings) and deadline.remaining() == 0:
        found.findings = [each for each in found.findings if each.topic != "peer"]
        what = "no pipe was tried within this host: the time of the doctor was over"
        why = "stores that do not answer, or a busy host, took it"
        change = "--timeout 60"
        found.findings.append(Finding(topic="pipe", verdict="note", what=what, why=(why,), change=change))
    return found


def _with_port(host: str) -> str:
    return f"[{host}]:0" if ":" in host else f"{host}:0"


def _refuse(link: ControlLink, _: Deadline) -> ControlLink:
    raise ClosedError(f"it connects for {link.agreement.purpose!r}, and here is a doctor")
