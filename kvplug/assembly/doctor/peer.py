"""Shakes hands with a peer as an engine would, and asks it about its host."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import attrs

from kvplug.assembly.doctor.diagnosis import Diagnosis
from kvplug.assembly.doctor.facts import FACTS, MODEL_FACTS, engine_with, fields_of, read_facts, values_of
from kvplug.assembly.examination.answering import Report, connector_options
from kvplug.assembly.examination.checks import of_two_hosts
from kvplug.assembly.examination.finding import (
    Finding,
    from_error,
    from_reasons,
    note,
    ok,
    problem,
)
from kvplug.assembly.examination.measuring import lacks_tensors, measure, not_measured, rate_finding
from kvplug.assembly.host import facts_of, secret_source
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.peers import CONTROL
from kvplug.assembly.registry import PluginStatus
from kvplug.assembly.resolve import ResolvedConfig, make_hello
from kvplug.config.config import Config, Role
from kvplug.engine.layout import PAGE_TOKENS
from kvplug.errors import (
    AuthenticationError,
    ConfigError,
    HandshakeError,
    InsecureAddressError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
    WireError,
)
from kvplug.negotiation.agreement import Agreement, agree
from kvplug.negotiation.exchange import exchange, hello_in
from kvplug.negotiation.hello import DOCTOR, EngineFacts, Hello
from kvplug.negotiation.model import UNKNOWN_WEIGHTS
from kvplug.net.deadline import Deadline
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection

_ANSWER_S: Final = 5.0
_NO_REPORT: Final = {
    "off": ("doctor is 'off' in its configuration", 'doctor = "measure"    (at the peer)'),
    "busy": ("it already serves too many doctors", "kvplug doctor    (again, when the others are done)"),
    "": ("its kvplug may be older", "pip install --upgrade kvplug    (there)"),
}
"""For each word that a peer sends instead of its report: its meaning, and what to change."""
_PAGE_TOKENS: Final = "page_tokens"
"""The option for the size of a connector's pages. It must be equal at both ends."""
_CONVERTED: Final = {
    "block_size": "--block-size of the engine: the same at both ends",
    "layout": "the engine's attention backend: the same at both ends",
    "device": "device: the same kind at both ends",
}
"""What to change so that a field is not converted."""


@attrs.frozen(kw_only=True)
class PeerExamination:
    """One conversation with a peer: dial, shake hands, ask, measure, and hang up. Errors become findings."""

    resolved: ResolvedConfig
    contact: str
    """The peer's address."""
    device: str
    """The device type of the tensors that an engine with this config moves."""
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    """Facts about this side's engine; missing ones are assumed to equal the peer's."""
    deadline: Deadline
    is_own: bool = False
    """Whether the peer is a listener in this process, whose host and options need no examination."""
    measures: bool = True
    """Whether the pipe is opened and measured."""
    found: Diagnosis = attrs.field(factory=Diagnosis)

    def run(self) -> Diagnosis:
        """Examine the peer. A KvplugError becomes a finding."""
        try:
            connection = Connection.dial(
                self.contact, self.resolved.credentials, CONTROL, self.deadline.remaining()
            )
            with contextlib.closing(Channel(connection)) as channel:
                self._examine(channel)
        except KvplugError as e:
            self.found.findings.append(unreachable(e, self.contact, self.resolved.config))
        return self.found

    def _examine(self, channel: Channel) -> None:
        findings, config = self.found.findings, self.resolved.config
        received = channel.recv(timeout=self.deadline.remaining())
        remote = hello_in(received)
        engine = None
        facts = {"weights": config.weights, **self.facts} if config.weights else self.facts
        if remote.engine is not None:
            engine = engine_with(facts, config.role or Role.BOTH, remote.engine)
            findings += of_pages(config, engine.block_size, engine.block_format)
        local = make_hello(self.resolved, engine, True, self.device, DOCTOR)
        agreement: Agreement | None = None
        reasons: tuple[str, ...] = ()
        try:
            agreement = exchange(channel, local, self.deadline.remaining(), received=received)
        except HandshakeError as e:
            reasons = e.reasons
        report = self._report(channel)
        is_running = remote.engine is not None or not report.facts
        stated = read_facts(f"{key}={value}" for key, value in report.facts.items() if key in FACTS)
        if not is_running:
            reasons = (*reasons, *_differing(local, remote, facts, stated))
            local = attrs.evolve(local, engine=engine_with(facts, Role.BOTH))
            remote = attrs.evolve(remote, engine=engine_with(stated, Role.BOTH))
        if not self.is_own:
            ours = values_of(local, {*facts, "role"} if is_running else facts)
            theirs = values_of(remote, None if is_running else stated)
            self.found.fields = tuple(fields_of(ours, theirs, reasons))
        if reasons:
            who = (
                f"{remote.identity}, engine {remote.engine_id[:12]}"
                if remote.engine
                else str(remote.identity)
            )
            findings += _refusals(self.resolved, reasons, who)
        elif agreement is not None:
            findings += self._of_agreement(
                agreement, remote, facts.keys() & (facts if is_running else stated).keys()
            )
        if not self.is_own:
            findings += self._of_host(report, remote.engine if is_running else None)
        if self.measures and agreement is not None and report.host is not None:
            findings += self._measured(channel, agreement, local)
        with contextlib.suppress(KvplugError):
            channel.send({"doctor": "bye"}, timeout=0.1)

    def _of_agreement(
        self, agreement: Agreement, remote: Hello, stated: Collection[str]
    ) -> Iterator[Finding]:
        yield ok("handshake", f"agreed with {remote.identity}")
        if remote.engine is not None and remote.engine.model.weights.startswith(UNKNOWN_WEIGHTS):
            yield problem(
                "weights",
                "the peer does not know its model's weights: no other engine can load its KV, and neither can"
                " the peer itself after a restart",
                change='weights = "NAME at REVISION"    (at both ends, if their weights are the same)',
            )
        if remote.engine is not None and not MODEL_FACTS & {*stated} - {"weights"}:
            yield note(
                "model",
                "the model of this side's engine was not stated, and was assumed to be the peer's",
                "whether the two engines have the same model is therefore unknown",
                change="--fact num_layers=N --fact num_kv_heads=N --fact head_size=N --fact dtype=NAME",
            )
        for field in self.found.fields:
            if field.outcome == "converted":
                yield note(
                    field.name,
                    f"ours {field.ours}, theirs {field.theirs}: it is converted",
                    "each page is rearranged when it is copied, which takes longer",
                    change=_CONVERTED[field.name],
                )
        for device, selection in agreement.transports.items():
            chosen, *others = selection.candidates
            yield ok("transport", f"{device} tensors go by {chosen}", *map(str, others))

    # -- the peer's answers --------------------------------------------------------------------

    def _report(self, channel: Channel) -> Report:
        deadline = self.deadline.within(_ANSWER_S)
        try:
            channel.send({"doctor": "report"}, timeout=deadline.remaining())
            answered = channel.recv(timeout=deadline.remaining())
            return Report.from_peer(answered.get("report") if isinstance(answered, dict) else None)
        except KvplugError:
            return Report(doctor="")

    def _of_host(self, report: Report, engine: EngineFacts | None) -> Iterator[Finding]:
        if report.host is None:
            reason, change = _NO_REPORT.get(report.doctor, _NO_REPORT[""])
            what = f"the peer does not report its host: {reason}"
            yield note("peer", what, "its limits are unknown, and no pipe is measured", change=change)
            return
        self.found.peer_host = report.host
        yield from report.findings
        yield from of_two_hosts(facts_of(self.resolved.config), report.host)
        yield from _of_connectors(self.resolved.config, report, engine)

    def _measured(self, channel: Channel, agreement: Agreement, local: Hello) -> Iterator[Finding]:
        device = self.device if self.device in agreement.transports else "cpu"
        selection = agreement.transports.get(device)
        if selection is None:
            return
        offers = (*local.transports, *agreement.remote.transports)
        claimed = min(offer.capabilities.cost.gb_per_s for offer in offers if offer.name == selection.chosen)
        try:
            if why := lacks_tensors(device) or self._ask_to_measure(channel, device):
                yield ok("rate", f"{selection.chosen}: not measured, since {why}")
                return
            settings = LinkSettings(resolved=self.resolved)
            link = ControlLink(settings, channel, agreement, accepted=False)
            measured = measure(link, device, claimed, self.deadline)
        except Exception as e:
            yield not_measured(selection.chosen, e, claimed)
        else:
            self.found.measured.append(measured)
            yield rate_finding(measured, agreement.cross_host)

    def _ask_to_measure(self, channel: Channel, device: str) -> str:
        """Ask the peer to measure. Return why it refuses; empty if it agrees."""
        channel.send(
            {"doctor": "measure", "device": device}, timeout=self.deadline.within(_ANSWER_S).remaining()
        )
        match channel.recv(timeout=self.deadline.remaining()):
            case {"measuring": True}:
                return ""
            case {"why": why}:
                return peer_text(why)
        return "the peer sent an unexpected answer"


def _refusals(resolved: ResolvedConfig, reasons: tuple[str, ...], who: str) -> Iterator[Finding]:
    """Yield the problems. If no transport fits, also name plugins that are not loaded and may have one."""
    failed = resolved.registry.failed
    blocked = any(each.status is PluginStatus.BLOCKED for each in failed)
    for each in from_reasons(reasons, who):
        if each.topic != "transport" or not failed:
            yield each
            continue
        more = "take it out of KVPLUG_DISABLE_PLUGINS" if blocked else "`kvplug list` shows what is broken"
        yield attrs.evolve(each, change=f"{each.change}; or {more}")
        yield from (note("plugins", f"{plugin.label}: {plugin.reason}", change=more) for plugin in failed)


def _differing(
    local: Hello, remote: Hello, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return why two engines with these facts, neither running, would refuse each other. Facts that only one
    end states are not compared."""
    both = ours.keys() & theirs.keys()
    mine, yours = (engine_with({key: facts[key] for key in both}, Role.BOTH) for facts in (ours, theirs))
    try:
        agree(attrs.evolve(local, engine=mine), attrs.evolve(remote, engine=yours))
    except HandshakeError as e:
        return e.reasons
    return ()


def of_pages(config: Config, block_size: int, block_format: str) -> Iterator[Finding]:
    """Check that the config's pages are whole blocks, if the engine's blocks cannot be divided."""
    tokens = connector_options(config).get(_PAGE_TOKENS, "")
    key = f"options.{config.connector}.{_PAGE_TOKENS}"
    if block_format and tokens.isdecimal() and int(tokens) % block_size:
        yield problem(
            key,
            f"a page has {tokens} tokens, and a block of the order {block_format!r} has {block_size}",
            "the engine does not start: there, a page must be a multiple of a block",
            change=f"{key} = {-(-int(tokens) // block_size) * block_size}",
        )


def _of_connectors(config: Config, report: Report, engine: EngineFacts | None) -> Iterator[Finding]:
    """Compare the two engines' connectors and their given options. ``engine`` is the peer's, if it runs."""
    name = report.connector
    if name != config.connector:
        yield problem(
            "connector",
            f"{config.connector} here, {name} at the peer",
            "a connector cannot read what another connector sends",
            change=f"connector = {config.connector!r}    (at both ends)",
        )
        return
    ours, theirs = connector_options(config), report.options
    for key in sorted(ours.keys() | theirs.keys()):
        default = "its default"
        if key == _PAGE_TOKENS and engine is not None:
            granule = engine.block_size if engine.block_format else 1
            default = f"{math.ceil(PAGE_TOKENS / granule) * granule} (the default)"
        mine, yours = (side.get(key, default) for side in (ours, theirs))
        if mine.partition(" (")[0] == yours.partition(" (")[0]:
            continue
        known = yours if mine == "its default" else mine
        # Engines with different known values refuse each other. Only the engine knows a default.
        make = problem if key == _PAGE_TOKENS and "its default" not in (mine, yours) else note
        yield make(
            f"options.{name}.{key}",
            f"{mine} here, {yours} at the peer",
            "both ends find pages only if the options that make them are equal; see the option's help",
            change=f"options.{name}.{key} = {known.partition(' (')[0]}    (at both ends, if it makes pages)",
        )


# -- errors --------------------------------------------------------------------------------------------

_ADDRESS: Final = '--peer, peers: the address in the engine\'s log ("serving pages at")'
_BY_CODE: Final = {
    "certificate name": (
        "tls",
        "tls_cert: one with HOST as subjectAltName (there); or tls_check_host = false",
    ),
    "certificate": ("tls", "tls_ca, tls_cert: signed by one authority at both ends, and not expired"),
    "tls": ("tls", "tls_cert, tls_key, tls_ca: at both ends, with one authority; or at neither"),
    "foreign": ("peer", _ADDRESS),
    "hung up": ("peer", f"{_ADDRESS}; tls_cert, tls_key and tls_ca at both ends"),
    "no route": ("peer", "docker run --network=host    (or a route to HOST)"),
}
"""For each error code: the topic, and what to change."""
_BY_CLASS: Final[Mapping[type[KvplugError], tuple[str, str]]] = {
    InsecureAddressError: (
        "secret",
        "secret_file: what `kvplug config secret FILE` prints    (the same file at both ends)",
    ),
    AuthenticationError: (
        "secret",
        "KVPLUG_SECRET or secret_file: the same at both ends; or one user at both ends, on one host",
    ),
    TimeoutError: (
        "peer",
        "kill -CONT PID at the peer if it is stopped, or a firewall rule that drops packets",
    ),
    PeerGoneError: ("peer", _ADDRESS),
    ConfigError: ("tls", "tls_cert, tls_key, tls_ca"),
    WireError: ("peer", "--peer HOST:PORT, unix:@NAME or unix:/PATH"),
    KvplugError: ("peer", ""),
}
"""The same for errors without a code. The first matching class counts."""


def unreachable(error: KvplugError, contact: str, config: Config) -> Finding:
    """Explain an error of dialling, or of the conversation that followed, to an operator."""
    if isinstance(error, HandshakeError):
        return from_reasons(error.reasons, "the peer")[0]
    by_class = next(found for kind, found in _BY_CLASS.items() if isinstance(error, kind))
    topic, change = _BY_CODE.get(error.code, by_class)
    why = []
    if topic == "secret" and not isinstance(error, InsecureAddressError):
        source = secret_source(config)
        why.append(f"this end's secret is from {source}" if source else "this end has no secret")
    if error.code == "no route":
        why.append("a container without the host's network has its own interfaces; see `interfaces`")
    if isinstance(error, PeerGoneError) and contact.startswith(("unix:@", "127.", "localhost:", "[::1]")):
        why.append(
            "abstract Unix sockets and loopback addresses reach only processes in one network namespace:"
            " containers need --network=host, a socket in a shared folder (unix:/path), or an address and a"
            " secret"
        )
    host = contact.rpartition(":")[0]
    found = from_error(topic, error, change.replace("HOST", host), f"{contact}: ")
    return attrs.evolve(found, why=tuple(why))
