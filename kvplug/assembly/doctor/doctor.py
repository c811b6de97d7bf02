"""Examines a config: its host, its stores, its peers, and one peer in detail."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import attrs

from kvplug.assembly.doctor.diagnosis import Diagnosis, Examination
from kvplug.assembly.doctor.explanation import explain
from kvplug.assembly.doctor.facts import Facts
from kvplug.assembly.doctor.finding import Finding, from_error, not_checked, note, ok, problem
from kvplug.assembly.doctor.host import of_device, of_limits
from kvplug.assembly.doctor.peer import of_pages, of_peer, of_rate
from kvplug.assembly.doctor.stores import LATE, of_directory, of_stores
from kvplug.assembly.host import facts_of
from kvplug.assembly.links import CONTROL, ControlLink, LinkSettings
from kvplug.assembly.peers import ControlPeers, LinkServer
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.config.config import Config, Role
from kvplug.errors import (
    AddressInUseError,
    ClosedError,
    ConfigError,
    KvplugError,
    TimeoutError,
    TransportError,
)
from kvplug.negotiation.hello import DOCTOR
from kvplug.net.deadline import Deadline
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.listener import Listener

TIMEOUT_S: Final = 30.0
"""The default limit on the time that an examination waits for other programs, in total."""
_PEER_S: Final = 5.0
"""The time limit for each of the config's peers."""
_LISTENER_S: Final = 2.0


def diagnose(
    config: Config,
    registry: Registry,
    *,
    peer: str | None = None,
    facts: Facts | None = None,
    write: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Diagnosis:
    """Examine a config on this host, and the peer at the contact ``peer``. Problems become findings.

    Args:
        facts: facts about this side's engine, as :func:`~kvplug.assembly.doctor.facts.read_facts` makes them;
            missing facts are assumed to equal the peer's.
        write: put a test page into each store, and remove it.
        timeout_s: limits the time spent waiting for other programs, in total. Plugin code that does not
            return is abandoned.
    """
    facts = facts or {}
    host = facts_of(config)
    found = Diagnosis(host=host)
    found.collect("config", explain(config, registry))
    if "block_size" in facts and peer is None:
        found.collect("config", of_pages(config, facts["block_size"], facts.get("block_format", "")))
    checks: list[tuple[str, Callable[[Examination], Iterator[Finding]]]] = [
        ("host", _of_host),
        ("stores", of_stores),
        ("peers", of_directory),
    ]
    if peer is None:
        checks += [("peers", _of_peers), ("host", _of_address), ("pipe", _of_own_pipe)]
    else:
        checks.append(("peer", functools.partial(of_peer, contact=peer)))
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  (this can take seconds, which the deadline must not include)
    examination = Examination(
        resolved=ResolvedConfig(config, registry),
        host=host,
        facts=facts,
        deadline=Deadline.after(timeout_s),
        write=write,
        found=found,
    )
    for topic, check in checks:
        found.collect(topic, check(examination))
    return found


def _of_host(examination: Examination) -> Iterator[Finding]:
    """Check this host's limits and device, and name its interfaces and versions."""
    facts, config = examination.host, examination.config
    yield from of_limits(facts, config.buffer_size)
    yield from of_device(config.device)
    shown = (f"{name} {', '.join(each)}" for name, each in facts.interfaces.items() if each)
    yield ok("interfaces", "; ".join(shown) or "no interface has an address")
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items()))


def _of_peers(examination: Examination) -> Iterator[Finding]:
    """Check that each engine that the config would load from completes a handshake."""
    config = examination.config
    peers = () if config.role is Role.PRODUCER else config.peer_addresses
    if not config.peers and config.role is Role.CONSUMER:
        peers = (config.control_address(),)
    if peers and (topics := examination.faulty_for_links()):
        yield not_checked("peers", f"{', '.join(peers)}: not examined", topics)
        return
    for peer in peers:
        deadline = examination.deadline.within(_PEER_S)
        examined = attrs.evolve(examination, deadline=deadline, found=Diagnosis())
        wrong = [each for each in of_peer(examined, peer, measures=False) if each.verdict == "problem"]
        more = f"`kvplug doctor --peer {peer}` examines it"
        yield from wrong or [ok("peers", f"{peer} answers and agrees; {more}")]


# -- this host's own listener ----------------------------------------------------------------------------


def _of_address(examination: Examination) -> Iterator[Finding]:
    """Check that worker 0 can listen at the configured address, by listening there for a moment."""
    resolved = examination.resolved
    if examination.config.role is Role.CONSUMER:
        return  # a consumer only dials
    address = examination.config.control_address()
    if topics := examination.faulty_for_credentials():
        yield not_checked("host", f"{address}: not tried", topics)
        return
    try:
        Listener.open(address, resolved.credentials, CONTROL).close()
    except AddressInUseError as e:
        yield _in_use(str(e), address, resolved)
    except (ConfigError, TransportError) as e:
        addresses = [address for each in examination.host.interfaces.values() for address in each]
        what = "; ".join(e.faults) if isinstance(e, ConfigError) else str(e)
        why = f"the interfaces of this network namespace have {', '.join(addresses) or 'no addresses'}"
        yield problem("host", what, why, change=f"host = {_suggested(addresses)!r}")
    else:
        yield ok("host", f"worker 0 can listen at {address}")


def _in_use(what: str, address: str, resolved: ResolvedConfig) -> Finding:
    """Judge an address in use: a note if an engine with these credentials listens there, else a problem."""
    change = "port_offset = 100    (for a second engine on this host)"
    try:
        Connection.dial(address, resolved.credentials, CONTROL, _LISTENER_S).close()
    except KvplugError as e:
        why = "an engine with this config cannot start while another program listens there"
        return problem("host", what, why, str(e), change=f"port: a free one; or {change}")
    why = "this is fine if the engine of this config listens there: `--peer` examines it"
    return note("host", what, why, change=change)


def _suggested(addresses: Iterable[str]) -> str:
    """Return the first address that other hosts may reach, or the loopback address if there is none."""
    for each in addresses:
        number = ipaddress.ip_address(each.partition("%")[0])
        if not (number.is_loopback or number.is_link_local):
            return each
    return "127.0.0.1"


def _of_own_pipe(examination: Examination) -> Iterator[Finding]:
    """Measure a pipe from this process to itself, of the kind that a peer like this one would use. Skip GPU
    pipes, which may need two processes."""
    host, findings = examination.config.host, examination.found.findings
    is_here = host.startswith("unix:") or examination.config.role is not Role.CONSUMER
    is_wrong = any(each.topic == "host" and each.verdict == "problem" for each in findings)
    if not is_here or is_wrong or examination.resolved.device_of_links != "cpu":
        return
    if topics := examination.faulty_for_links():
        yield not_checked("pipe", "no pipe was tried here", topics)
        return
    address = "unix:" if host.startswith("unix:") else f"[{host}]:0" if ":" in host else f"{host}:0"
    settings = LinkSettings(resolved=examination.resolved)
    try:
        with ControlPeers(settings, listen=address).serve(_refuse) as server:
            peers = ControlPeers(settings, connect=server.contact)
            link = peers.connect(0, DOCTOR, examination.deadline.remaining(), retry=False)
            with contextlib.closing(link):
                yield from of_rate(examination, link)
    except TimeoutError as e:
        yield note("pipe", "no pipe was tried here: the doctor ran out of time", str(e), change=LATE)
    except KvplugError as e:
        yield from_error("pipe", e, 'transport = "auto"', "no pipe works within this host: ")


def serve_doctors(config: Config, registry: Registry, facts: Facts | None = None) -> LinkServer[ControlLink]:
    """Answer doctors at the config's address, in place of an engine, until the server is closed. Pass the
    server's ``contact`` to the other doctor as ``--peer``.

    Raises:
        ConfigError: the config has faults.
        InsecureAddressError, AddressInUseError: the server cannot listen there.
    """
    resolved = ResolvedConfig(config, registry)
    resolved.check()
    settings = LinkSettings(resolved=resolved, engine_facts=facts or {})
    return ControlPeers(settings).serve(_refuse)


def _refuse(link: ControlLink, _: Deadline) -> ControlLink:
    raise ClosedError(f"the peer connected for {link.agreement.purpose!r}, but only doctors are served here")
