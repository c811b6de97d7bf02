"""The whole examination of a config: its host, its stores, its peers, and one peer in detail."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs

from kvplug.assembly.doctor.diagnosis import Diagnosis
from kvplug.assembly.doctor.explanation import explain
from kvplug.assembly.doctor.facts import FACTS, token_bytes
from kvplug.assembly.doctor.peer import PeerExamination, of_pages
from kvplug.assembly.doctor.stores import LATE, of_directory, of_stores
from kvplug.assembly.examination.checks import of_host
from kvplug.assembly.examination.finding import Finding, from_error, note, ok, problem
from kvplug.assembly.examination.measuring import lacks_tensors
from kvplug.assembly.host import SHARED_MEMORY, HostFacts, facts_of
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.peers import CONTROL, ControlPeers, LinkServer
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig, credentials_of
from kvplug.config.config import Config, Role
from kvplug.errors import (
    AddressInUseError,
    ClosedError,
    ConfigError,
    KvplugError,
    TransportError,
)
from kvplug.net.deadline import Deadline
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.listener import Listener

TIMEOUT_S: Final = 30.0
"""The longest time of an examination, for when nothing answers."""
_PEER_S: Final = 5.0
"""The longest time for one of the config's peers."""
_LISTENER_S: Final = 2.0
_Examine = Callable[..., PeerExamination]


def diagnose(
    config: Config,
    registry: Registry,
    *,
    peer: str | None = None,
    facts: Mapping[str, Any] | None = None,
    write: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Diagnosis:
    """Examine a config on this host, and the peer at the contact ``peer``. Problems become findings.

    Args:
        facts: facts about this side's engine, as :func:`~kvplug.assembly.doctor.facts.read_facts` makes them;
            missing facts are assumed to equal the peer's.
        write: put a test page into each store, and remove it.
        timeout_s: limits all waiting for others. Plugin code that does not return is abandoned.

    Raises:
        ConfigError: ``facts`` has an unknown key.
    """
    facts = facts or {}
    if unknown := sorted(facts.keys() - set(FACTS)):
        raise ConfigError(*(f"{key}: not a fact of an engine" for key in unknown), source="the facts")
    resolved = ResolvedConfig(config, registry)
    found = Diagnosis()
    found.collect("config", lambda: explain(config, registry))
    found.collect("host", lambda: _of_host(found, config))
    found.collect("device", lambda: _of_device(config))
    if peer is None and "block_size" in facts:
        found.findings += of_pages(config, facts["block_size"], facts.get("block_format", ""))
    is_usable = all(each.topic in _HARMLESS for each in found.findings if each.verdict == "problem")
    if not is_usable and peer is None:
        return found
    lacks_tensors("cpu")  # imports PyTorch now: that can take seconds, which the deadline must not include
    deadline = Deadline.after(timeout_s)
    examine = functools.partial(
        PeerExamination, resolved=resolved, device=resolved.device_of_links, facts=facts, deadline=deadline
    )
    if peer is None:
        found.collect("host", lambda: _of_address(config, found.host or HostFacts()))
    if is_usable:
        budget = token_bytes(facts)
        found.collect("stores", lambda: of_stores(resolved, deadline, write=write, token_bytes=budget))
        found.collect("peers", lambda: of_directory(resolved, deadline))
    if peer is not None:
        with contextlib.suppress(ConfigError):  # a finding of the config
            credentials_of(config)
            examine(contact=peer, found=found).run()
        return found
    found.collect("peers", lambda: _of_peers(config, examine, deadline))
    if not any(each.topic == "host" and each.verdict == "problem" for each in found.findings):
        found.collect("pipe", lambda: _of_own_pipe(found, resolved, examine, deadline))
    return found


_HARMLESS: Final = frozenset(
    {SHARED_MEMORY, "device", "descriptors", "buffer_size", "files", "locked memory", "stores"}
)
"""Topics whose problems do not prevent the other checks."""


def _of_host(found: Diagnosis, config: Config) -> Iterator[Finding]:
    """Yield findings about this host's limits, interfaces and versions."""
    facts = found.host = facts_of(config)
    yield from of_host(facts, config)
    shown = "; ".join(f"{name} {addresses}" for name, addresses in facts.interfaces.items() if addresses)
    yield ok("interfaces", shown or "no interface has an address")
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items()))


def _of_device(config: Config) -> Iterator[Finding]:
    """Check that PyTorch finds the config's device. Makes no tensor, which would take GPU memory."""
    kind, _, index = config.device.partition(":")
    if kind != "cuda":
        return
    try:
        import torch
    except ImportError:
        yield note("device", "not checked: PyTorch is not installed here", change="pip install torch")
        return
    count = torch.cuda.device_count()
    if int(index or 0) < count:
        yield ok("device", f"PyTorch finds {count} GPUs")
    else:
        yield problem(
            "device",
            f"there is no {config.device} here: PyTorch {torch.__version__} finds {count} GPUs",
            "this container does not have the GPU, or PyTorch was built without CUDA",
            change='docker run --gpus=all    (or device = "cpu")',
        )


def _of_address(config: Config, facts: HostFacts) -> Iterator[Finding]:
    """Check that worker 0 can listen at the configured address, by listening there for a moment."""
    if config.role is Role.CONSUMER:
        return  # it dials
    try:
        credentials, address = credentials_of(config), config.control_address()
    except ConfigError:
        return  # a finding of the config
    try:
        Listener.open(address, credentials, CONTROL).close()
    except AddressInUseError as e:
        yield _of_listener(str(e), address, credentials)
    except (ConfigError, TransportError) as e:
        has = ", ".join(filter(None, facts.interfaces.values())) or "no addresses"
        what = "; ".join(e.faults) if isinstance(e, ConfigError) else str(e)
        why = f"the interfaces of this network namespace have {has}"
        yield problem("host", what, why, change=f"host = {_suggested(facts)!r}")
    else:
        yield ok("host", f"worker 0 can listen at {address}")


def _of_listener(what: str, address: str, credentials: Credentials) -> Finding:
    """Check whether an engine with these credentials, perhaps that of this config, uses the address."""
    change = "port_offset = 100    (for a second engine on this host)"
    try:
        Connection.dial(address, credentials, CONTROL, _LISTENER_S).close()
    except KvplugError as e:
        why = "an engine with this config cannot start while another program listens there"
        return problem("host", what, why, str(e), change=f"port: a free one; or {change}")
    why = "if that is the engine of this config, this is fine: `--peer` examines it"
    return note("host", what, why, change=change)


def _suggested(facts: HostFacts) -> str:
    """Return an address of this host that others may reach; loopback if it has no other."""
    every = [each for addresses in facts.interfaces.values() for each in addresses.split(", ") if each]
    for each in every:
        number = ipaddress.ip_address(each.partition("%")[0])
        if not (number.is_loopback or number.is_link_local):
            return each
    return "127.0.0.1"


def _of_peers(config: Config, examine: _Examine, deadline: Deadline) -> Iterator[Finding]:
    """Check that each engine from which the config would load answers and agrees."""
    peers = () if config.role is Role.PRODUCER else config.peer_addresses
    if not config.peers and config.role is Role.CONSUMER:
        peers = (config.control_address(),)
    for peer in peers:
        examined = examine(contact=peer, deadline=deadline.within(_PEER_S), measures=False).run()
        wrong = [each for each in examined.findings if each.verdict == "problem"]
        more = f"`kvplug doctor --peer {peer}` examines it"
        yield from wrong or [ok("peers", f"{peer} answers and agrees; {more}")]


def _of_own_pipe(
    found: Diagnosis, resolved: ResolvedConfig, examine: _Examine, deadline: Deadline
) -> Iterator[Finding]:
    """Try a handshake with a listener in this process, and the pipe that peers like this one would use."""
    host = resolved.config.host
    address = "unix:" if host.startswith("unix:") else f"[{host}]:0" if ":" in host else f"{host}:0"
    try:
        with ControlPeers(LinkSettings(resolved=resolved), listen=address).serve(_refuse) as server:
            examined = examine(contact=server.contact, facts={}, is_own=True).run()
    except KvplugError as e:
        yield from_error("pipe", e, 'transport = "auto"', "no pipe within this host: ")
        return
    found.measured += examined.measured
    for each in examined.findings:
        if each.topic == "peer" and deadline.expired:
            what = "no pipe was tried within this host: the doctor ran out of time"
            yield note("pipe", what, "unresponsive stores, or a busy host, used up the time", change=LATE)
        elif each.verdict == "problem":
            yield attrs.evolve(each, what=f"within this host: {each.what}")
        elif each.topic not in ("handshake", "transport"):  # `kvplug explain` reports these
            yield each


def serve_doctors(
    config: Config,
    registry: Registry,
    address: str | None = None,
    facts: Mapping[str, str | int] | None = None,
) -> LinkServer[ControlLink]:
    """Answer doctors at an address where no engine is running, until the server is closed. The other doctor
    takes the server's ``contact`` as ``--peer``.

    Raises:
        ConfigError: the config has faults.
        InsecureAddressError, AddressInUseError: the server cannot listen there.
    """
    resolved = ResolvedConfig(config, registry)
    resolved.check()
    settings = LinkSettings(resolved=resolved, engine_facts=facts or {})
    return ControlPeers(settings, listen=address).serve(_refuse)


def _refuse(link: ControlLink, _: Deadline) -> ControlLink:
    raise ClosedError(f"the peer connected for {link.agreement.purpose!r}, but only doctors are served here")
