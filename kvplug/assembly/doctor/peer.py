"""Shakes hands with a peer as an engine would, and asks it about its host."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import attrs

from kvplug.assembly.doctor.facts import MODEL_FACTS, Field, engine_with, facts_from_peer, fields_of
from kvplug.assembly.examination.finding import (
    Finding,
    from_peer,
    from_reasons,
    line_for_resource,
    note,
    ok,
    problem,
)
from kvplug.assembly.examination.host import (
    HostFacts,
    connector_options,
    facts_of,
    of_two_hosts,
    secret_source,
    texts,
)
from kvplug.assembly.examination.measuring import (
    Measured,
    lacks_tensors,
    measure,
    not_measured,
    rate_finding,
)
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
    ResourceExhaustedError,
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
    "busy": (
        "it serves as many doctors as it may",
        "kvplug doctor    (again, when the others are done)",
    ),
    "": ("its kvplug may be older", "pip install --upgrade kvplug    (there)"),
}
"""The word that a peer sends in place of its report: what it means, and what to change."""
_PAGE_TOKENS: Final = "page_tokens"
"""The option by which connectors divide KV into pages: it must be equal at both ends."""
_CONVERTED: Final = {
    "block_size": "--block-size of the engine: the same at both ends",
    "layout": "the engine's attention backend: the same at both ends",
}
"""What to change so that a field need not be converted."""


class PeerExamination:
    """One conversation with a peer: dial, shake hands, ask, measure, and hang up. What goes wrong is a
    finding."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        contact: str,
        device: str,
        facts: Mapping[str, Any],
        deadline: Deadline,
        *,
        own: bool = False,
        measures: bool = True,
    ) -> None:
        """
        Args:
            device: type of the device of the tensors that an engine with this config moves.
            facts: of this side's engine; the others are taken to be the peer's.
            own: the peer's host and options are not looked at, as those of a listener of this process.
            measures: the pipe is opened and measured.
        """
        self.contact = contact
        """Its address."""
        self.findings: list[Finding] = []
        self.fields: tuple[Field, ...] = ()
        self.host: HostFacts | None = None
        self.measured: list[Measured] = []
        self._resolved = resolved
        self._device = device
        weights = resolved.config.weights
        self._facts = {"weights": weights, **facts} if weights else facts
        self._deadline = deadline
        self._own = own
        self._measures = measures
        try:
            with contextlib.closing(_dialled(contact, resolved, deadline)) as channel:
                self._examine(channel)
        except KvplugError as e:
            self.findings.append(unreachable(e, self.contact, resolved.config))

    def _examine(self, channel: Channel) -> None:
        received = channel.recv(timeout=self._deadline.remaining())
        try:
            remote = hello_in(received)
        except HandshakeError as e:
            self.findings += from_reasons(e.reasons, "the peer")
            return
        engine = None
        if remote.engine is not None:
            role = self._resolved.config.role or Role.BOTH
            engine = engine_with(self._facts, role, remote.engine)
            self.findings += of_pages(self._resolved.config, engine.block_size, engine.block_format)
        local = make_hello(self._resolved, engine, True, self._device, DOCTOR)
        agreement: Agreement | None = None
        reasons: tuple[str, ...] = ()
        try:
            agreement = exchange(channel, local, self._deadline.remaining(), received=received)
        except HandshakeError as e:
            reasons = e.reasons
        report = self._report(channel)
        ours, theirs = self._facts.keys(), None
        if remote.engine is None and (stated := facts_from_peer(report.get("facts"))):
            theirs = stated.keys()
            reasons = (*reasons, *_differing(local, remote, self._facts, stated))
            local = attrs.evolve(local, engine=engine_with(self._facts, Role.BOTH))
            remote = attrs.evolve(remote, engine=engine_with(stated, Role.BOTH))
        if not self._own:
            self.fields = fields_of(local, remote, reasons, ours, theirs)
        self.findings += self._of_agreement(agreement, remote, reasons, ours & (theirs or ours))
        if not self._own:
            self._of_host(report, remote.engine if theirs is None else None)
        if self._measures and agreement is not None and "host" in report:
            self._measure(channel, agreement, local)
        with contextlib.suppress(KvplugError):
            channel.send({"doctor": "bye"}, timeout=0.1)

    def _of_agreement(
        self,
        agreement: Agreement | None,
        remote: Hello,
        reasons: tuple[str, ...],
        stated: Collection[str],
    ) -> Iterator[Finding]:
        who = f"{remote.identity}, engine {remote.engine_id[:12]}" if remote.engine else str(remote.identity)
        if reasons:
            yield from self._refusals(reasons, who)
            return
        if agreement is None:
            return
        yield ok("handshake", f"agreed with {who}")
        if remote.engine is not None and remote.engine.model.weights.startswith(UNKNOWN_WEIGHTS):
            yield problem(
                "weights",
                "the peer does not know its model's weights: no other engine can load its KV, nor can it"
                " itself after a restart",
                change='weights = "NAME at REVISION"    (at both ends, if their weights are the same)',
            )
        if remote.engine is not None and not MODEL_FACTS & {*stated} - {"weights"}:
            yield note(
                "model",
                "the model of this side's engine was not stated, and was taken to be the peer's",
                "so whether the two engines have the same model is unknown",
                change="--fact num_layers=N --fact num_kv_heads=N --fact head_size=N --fact dtype=NAME",
            )
        for field in self.fields:
            if field.outcome == "converted":
                yield note(
                    field.name,
                    f"ours {field.ours}, theirs {field.theirs}: it is converted",
                    "each page is rearranged when it is copied, which takes longer",
                    change=_CONVERTED.get(field.name, "device: the same kind at both ends"),
                )
        for device, selection in agreement.transports.items():
            chosen, *others = selection.candidates
            yield ok("transport", f"{device} tensors go by {chosen}", *map(str, others))

    def _refusals(self, reasons: tuple[str, ...], who: str) -> Iterator[Finding]:
        """Where no transport can be used, a plugin that is not loaded may have the one that could."""
        failed = self._resolved.registry.failed
        blocked = any(each.status is PluginStatus.BLOCKED for each in failed)
        for each in from_reasons(reasons, who):
            if each.topic != "transport" or not failed:
                yield each
                continue
            more = "take it out of KVPLUG_DISABLE_PLUGINS" if blocked else "`kvplug list` says what is broken"
            yield attrs.evolve(each, change=f"{each.change}; or {more}")
            yield from (note("plugins", f"{plugin.label}: {plugin.reason}", change=more) for plugin in failed)

    # -- the peer's answers --------------------------------------------------------------------

    def _report(self, channel: Channel) -> Mapping[str, Any]:
        try:
            channel.send({"doctor": "report"}, timeout=self._within())
            answered = channel.recv(timeout=self._within())
        except KvplugError:
            return {}
        report = answered.get("report") if isinstance(answered, dict) else None
        return report if isinstance(report, dict) else {}

    def _within(self) -> float:
        left = self._deadline.remaining()
        return _ANSWER_S if left is None else min(left, _ANSWER_S)

    def _of_host(self, report: Mapping[str, Any], engine: EngineFacts | None) -> None:
        if "host" not in report:
            reason, change = _NO_REPORT.get(peer_text(report.get("doctor")), _NO_REPORT[""])
            what = f"the peer does not report its host: {reason}"
            why = "its limits are unknown, and no pipe is measured"
            self.findings.append(note("peer", what, why, change=change))
            return
        config = self._resolved.config
        self.host = HostFacts.from_plain(report["host"])
        self.findings += from_peer(report.get("findings"))
        self.findings += of_two_hosts(facts_of(config), self.host)
        self.findings += _of_connectors(config, report, engine)

    def _measure(self, channel: Channel, agreement: Agreement, local: Hello) -> None:
        device = self._device if self._device in agreement.transports else "cpu"
        selection = agreement.transports.get(device)
        if selection is None:
            return
        offers = (*local.transports, *agreement.remote.transports)
        claimed = min(offer.capabilities.cost.gb_per_s for offer in offers if offer.name == selection.chosen)
        try:
            why = lacks_tensors(device) or self._ask_to_measure(channel, device)
            if why:
                self.findings.append(ok("rate", f"{selection.chosen}: not measured, since {why}"))
                return
            settings = LinkSettings(resolved=self._resolved)
            link = ControlLink(settings, channel, agreement, accepted=False)
            measured = measure(link, device, claimed, self._deadline)
        except Exception as e:
            self.findings.append(not_measured(selection.chosen, e, claimed))
        else:
            self.measured.append(measured)
            self.findings.append(rate_finding(measured, agreement.cross_host))

    def _ask_to_measure(self, channel: Channel, device: str) -> str:
        """Why the peer does not measure; empty: it does."""
        channel.send({"doctor": "measure", "device": device}, timeout=self._within())
        answered = channel.recv(timeout=self._deadline.remaining())
        if isinstance(answered, dict) and answered.get("measuring") is True:
            return ""
        return peer_text(answered.get("why")) if isinstance(answered, dict) else "the peer answers otherwise"


def _dialled(contact: str, resolved: ResolvedConfig, deadline: Deadline) -> Channel:
    return Channel(Connection.dial(contact, resolved.credentials, CONTROL, deadline.remaining()))


def _differing(
    local: Hello, remote: Hello, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Why two engines with these facts, which do not run, would refuse each other. What only one end states
    is not compared."""
    both = ours.keys() & theirs.keys()
    mine, yours = (engine_with({key: facts[key] for key in both}, Role.BOTH) for facts in (ours, theirs))
    try:
        agree(attrs.evolve(local, engine=mine), attrs.evolve(remote, engine=yours))
    except HandshakeError as e:
        return e.reasons
    return ()


def of_pages(config: Config, block_size: int, block_format: str) -> Iterator[Finding]:
    """Whether the pages of the config are whole blocks, where the inside of a block cannot be divided."""
    tokens, key = (
        connector_options(config).get(_PAGE_TOKENS, ""),
        f"options.{config.connector}.{_PAGE_TOKENS}",
    )
    if block_format and tokens.isdecimal() and int(tokens) % block_size:
        yield problem(
            key,
            f"a page has {tokens} tokens, and a block {block_size}, inside of the order {block_format!r}",
            "the engine does not start: a page must be a multiple of a block there",
            change=f"{key} = {-(-int(tokens) // block_size) * block_size}",
        )


def _of_connectors(
    config: Config, report: Mapping[str, Any], engine: EngineFacts | None
) -> Iterator[Finding]:
    """Where the two engines' connectors, or the options that they were given, differ. ``engine``: the peer's,
    where one runs there."""
    name = peer_text(report.get("connector"), 80)
    if name != config.connector:
        yield problem(
            "connector",
            f"{config.connector} here, {name} at the peer",
            "one connector does not know what another one sends",
            change=f"connector = {config.connector!r}    (at both ends)",
        )
        return
    ours, theirs = connector_options(config), texts(report.get("options"))
    for key in sorted(ours.keys() | theirs.keys()):
        default = "its default"
        if key == _PAGE_TOKENS and engine is not None:
            granule = engine.block_size if engine.block_format else 1
            default = f"{math.ceil(PAGE_TOKENS / granule) * granule} (the default)"
        mine, yours = (side.get(key, default) for side in (ours, theirs))
        if mine.partition(" (")[0] == yours.partition(" (")[0]:
            continue
        # Engines refuse each other then, if both values are known; a default is known to the engine alone.
        make = problem if key == _PAGE_TOKENS and "its default" not in (mine, yours) else note
        yield make(
            f"options.{name}.{key}",
            f"{mine} here, {yours} at the peer",
            "pages are found by both only if what makes them is equal; see the option's help",
            change=f"options.{name}.{key} = {mine.partition(' (')[0]}    (at both ends, if it makes pages)",
        )


def unreachable(error: KvplugError, contact: str, config: Config) -> Finding:
    """What an error of dialling, or of the conversation that followed, means for an operator."""
    if isinstance(error, HandshakeError):
        return from_reasons(error.reasons, "the peer")[0]
    why = [str(error)]
    topic, what, change = _unreachable(error, contact)
    if topic == "secret" and not isinstance(error, InsecureAddressError):
        source = secret_source(config)
        why.append(f"this end's secret is that of {source}" if source else "this end has no secret")
    if error.code == "no route":
        why.append("a container without the host's network has interfaces of its own; see `interfaces`")
    if isinstance(error, PeerGoneError) and contact.startswith(("unix:@", "127.", "localhost:", "[::1]")):
        why.append(
            "abstract Unix sockets and loopback addresses reach only processes in one network namespace:"
            " containers need --network=host, a socket in a shared folder (unix:/path), or an address and a"
            " secret"
        )
    return problem(topic, f"{contact}: {what}", *why, change=change)


def _unreachable(error: KvplugError, contact: str) -> tuple[str, str, str]:
    """The topic, what is wrong, and what to change."""
    host = contact.rpartition(":")[0]
    address = f'--peer, peers: the address in the engine\'s log ("serving pages at"), not {contact}'
    match error, error.code:
        case InsecureAddressError(), _:
            what = "it is an address of TCP, and there is neither a secret nor TLS"
            change = "secret_file: what `kvplug config secret FILE` prints    (the same file at both ends)"
            return "secret", what, change
        case AuthenticationError(), "certificate name":
            change = f"tls_cert: one with {host} as subjectAltName (there); or tls_check_host = false (here)"
            return "tls", "the certificate there names other hosts than the one that is dialled", change
        case AuthenticationError(), "certificate":
            change = "tls_ca, tls_cert: signed by one authority at both ends, and not expired"
            return "tls", "one end does not accept the certificate of the other one", change
        case AuthenticationError(), "tls":
            change = "tls_cert, tls_key, tls_ca: at both ends, with one authority; or at neither"
            return "tls", "one end uses TLS, and the other does not", change
        case AuthenticationError(), "foreign":
            return "peer", "another program listens there", address
        case AuthenticationError(), _:
            change = (
                "KVPLUG_SECRET or secret_file: the same at both ends; or one user at both ends, on one host"
            )
            return "secret", "one end has not proved itself to the other", change
        case ResourceExhaustedError(resource=resource), _:
            return resource, "a resource has run out", line_for_resource(resource)
        case TimeoutError(), _:
            what = "it does not answer: it is stopped, overloaded, or a firewall drops what is sent"
            return "peer", what, f"kill -CONT PID at the peer, or a rule of the firewall for {contact}"
        case PeerGoneError(), "hung up":
            what = (
                "it closed the connection at once: it is another program, or is ending, or uses TLS when this"
                " end does not"
            )
            change = "--peer: the address in the engine's log; tls_cert, tls_key and tls_ca at both ends"
            return "peer", what, change
        case PeerGoneError(), "no route":
            change = f"docker run --network=host    (or a route to {host})"
            return "peer", "this network namespace has no route to it", change
        case PeerGoneError(), "unknown host":
            return "peer", "its name is not known here", address
        case PeerGoneError(), _:
            return "peer", "no process listens there", address
        case ConfigError(), _:
            return "tls", "this end cannot connect with its configuration", "tls_cert, tls_key, tls_ca"
        case WireError(), _:
            what = "it is not an address of kvplug, or the program there uses another protocol"
            return "peer", what, "--peer HOST:PORT, unix:@NAME or unix:/PATH"
        case _:
            return "peer", "the examination did not finish", ""
