"""The whole examination of a config: this host, its stores, and a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs

from kvplug.assembly.doctor.facts import FACTS, token_bytes
from kvplug.assembly.doctor.fields import Field
from kvplug.assembly.doctor.here import of_address, of_config, of_device, of_host, of_own_pipe
from kvplug.assembly.doctor.peer import PeerExamination, examine_peer
from kvplug.assembly.doctor.stores import of_stores
from kvplug.assembly.examination.finding import Finding
from kvplug.assembly.examination.host import SHARED_MEMORY, HostFacts, facts_of
from kvplug.assembly.examination.measuring import Measured, lacks_tensors
from kvplug.assembly.explanation import faults_of, source_of
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.peers import ControlPeers, LinkServer
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig, device_of_links
from kvplug.config import Config
from kvplug.errors import ClosedError, ConfigError, KvplugError, PluginError
from kvplug.net.deadline import Deadline
from kvplug.transport.spec import Kind

TIMEOUT_S: Final = 30.0
"""How long an examination takes at most, when everything is silent."""


@attrs.define(kw_only=True)
class Diagnosis:
    """Everything that was found."""

    findings: list[Finding] = attrs.field(factory=list)
    fields: tuple[Field, ...] = ()
    """Of the handshake with the peer; empty without one."""
    host: HostFacts | None = None
    peer_host: HostFacts | None = None
    measured: list[Measured] = attrs.field(factory=list)

    @property
    def problems(self) -> int:
        return sum(finding.verdict == "problem" for finding in self.findings)

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "problems": self.problems,
            "findings": [each.to_plain() for each in self.findings],
            "fields": [attrs.asdict(each) for each in self.fields],
            "measured": [attrs.asdict(each) for each in self.measured],
            "host": None if self.host is None else self.host.to_plain(),
            "peer_host": None if self.peer_host is None else self.peer_host.to_plain(),
        }


def diagnose(
    config: Config,
    registry: Registry,
    *,
    peer: str | None = None,
    facts: Mapping[str, Any] | None = None,
    write: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Diagnosis:
    """Examine a config on this host, and the peer at the contact ``peer``. Never raises for what is wrong.

    Args:
        facts: of this side's engine, as :func:`~kvplug.assembly.doctor.facts.read_facts` makes them; those
            that are not given are taken to be the peer's.
        write: put a page of the doctor's own into each store, and remove it.
        timeout_s: the end of all waiting for others. Code of a plugin that does not return is left behind.
    """
    unknown = sorted(set(facts or ()) - set(FACTS))
    if unknown:
        raise ConfigError(*(f"{key}: no fact of an engine" for key in unknown), source="the facts")
    found = Diagnosis()
    resolved = ResolvedConfig(config, registry)
    host = found.host = _guarded(found, "host", lambda: facts_of(config)) or HostFacts()
    _collect(found, "config", lambda: of_config(resolved))
    _collect(found, "host", lambda: of_host(host, config))
    _collect(found, "device", lambda: of_device(config))
    is_usable = not found.problems or all(
        each.topic in _HARMLESS for each in found.findings if each.verdict == "problem"
    )
    if not is_usable and peer is None:
        return found
    lacks_tensors("cpu")  # imports PyTorch, which takes seconds on a busy host, and is no waiting for others
    deadline = Deadline.after(timeout_s)
    if peer is None:
        _collect(found, "host", lambda: of_address(config, host))
    device = _device(resolved)
    if is_usable:
        _collect(
            found,
            "stores",
            lambda: of_stores(resolved, deadline, write=write, token_bytes=token_bytes(facts or {})),
        )
    if peer is None:
        if not any(each.topic == "host" and each.verdict == "problem" for each in found.findings):
            _examined(found, lambda: of_own_pipe(resolved, device, deadline))
        _mention_peers(found, config)
    else:
        _examined(found, lambda: examine_peer(resolved, peer, device, facts or {}, deadline))
    return found


_HARMLESS: Final = frozenset(
    {SHARED_MEMORY, "device", "descriptors", "buffer_size", "files", "locked memory", "stores"}
)
"""Topics of problems with which the rest can be tried all the same."""


def _device(resolved: ResolvedConfig) -> str:
    try:
        spec = resolved.registry.get(Kind.CONNECTOR, resolved.config.connector)
    except PluginError:
        return resolved.config.device.partition(":")[0]
    return device_of_links(resolved.config, spec)


def _mention_peers(found: Diagnosis, config: Config) -> None:
    for peer in config.peer_addresses:
        what = f"{peer} was not examined: `kvplug doctor --peer {peer}` does"
        found.findings.append(Finding(topic="peers", verdict="ok", what=what))


def _examined(found: Diagnosis, examine: Callable[[], PeerExamination]) -> None:
    examined = _guarded(found, "peer", examine)
    if examined is not None:
        found.findings += examined.findings
        found.fields = examined.fields
        found.peer_host = examined.host
        found.measured += examined.measured


def _collect(found: Diagnosis, topic: str, of: Callable[[], Iterable[Finding]]) -> None:
    def each() -> bool:
        found.findings.extend(of())
        return True

    _guarded(found, topic, each)


def _guarded(found: Diagnosis, topic: str, call: Callable[[], Any]) -> Any:
    """What the call returns; ``None``, and a finding, where it fails in a way that no finding says yet."""
    try:
        return call()
    except KvplugError as e:
        what = "; ".join(e.faults) if isinstance(e, ConfigError) else str(e)
        if all(each.what not in what for each in found.findings if each.verdict == "problem"):
            found.findings.append(Finding(topic=topic, verdict="problem", what=what, change=topic))
    except OSError as e:
        found.findings.append(Finding(topic=topic, verdict="problem", what=f"{type(e).__name__}: {e}"))
    return None


def problems_with(error: KvplugError) -> Diagnosis:
    """The diagnosis of a config that cannot even be read."""
    whole = (
        f"{getattr(error, 'source', '') or 'the configuration'}    (or another file: --config, KVPLUG_CONFIG)"
    )
    return Diagnosis(
        findings=[
            Finding(
                topic="config",
                verdict="problem",
                what=str(fault),
                why=source_of(fault, error),
                change=fault.line or whole,
            )
            for fault in faults_of(error)
        ]
    )


class DoctorServer:
    """Answers doctors at an address until it is closed, where no engine runs that would."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        address: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises what listening raises, and ConfigError for a config with faults."""
        resolved = ResolvedConfig(config, registry)
        resolved.check()
        settings = LinkSettings(resolved=resolved, engine_facts=dict(facts or {}))
        self._peers = ControlPeers(settings, listen=address)
        self._server: LinkServer[ControlLink] = self._peers.serve(_refuse, ControlLink.close)
        self.contact = self._server.contact
        """For the other doctor's ``--peer``."""

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._peers.close()

    def __enter__(self) -> DoctorServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse(link: ControlLink, _: Deadline) -> ControlLink:
    raise ClosedError(f"it connects for {link.agreement.purpose!r}, and here is a doctor")
