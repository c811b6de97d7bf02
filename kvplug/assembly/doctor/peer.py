"""Shakes hands with a peer as an engine would, and asks it about its host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from kvplug.assembly.doctor.facts import MODEL_FACTS, engine_with, facts_from_peer
from kvplug.assembly.doctor.fields import Field, fields_of
from kvplug.assembly.doctor.rate import not_measured, rate_finding
from kvplug.assembly.doctor.unreachable import unreachable
from kvplug.assembly.examination.finding import (
    Finding,
    field_of,
    findings_of_peer,
    line_for,
    refusals,
)
from kvplug.assembly.examination.host import HostFacts, connector_options, facts_of, texts
from kvplug.assembly.examination.limits import findings_of_two
from kvplug.assembly.examination.measuring import Measured, lacks_tensors, measure
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.peers import CONTROL
from kvplug.assembly.resolve import ResolvedConfig, make_hello
from kvplug.config import Config
from kvplug.errors import HandshakeError, KvplugError
from kvplug.negotiation.agreement import Agreement, agree
from kvplug.negotiation.exchange import exchange, hello_in
from kvplug.negotiation.hello import BOTH, DOCTOR, Hello
from kvplug.negotiation.model import UNKNOWN_WEIGHTS
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import dial

_ANSWER_S: Final = 5.0
_SILENT: Final = {
    "off": ("doctor is 'off' in its configuration", 'doctor = "measure"    (at the peer)'),
    "busy": ("it answers as many doctors as it may", "kvplug doctor    (again, when the others are done)"),
    "": ("its kvplug may be older", "pip install --upgrade kvplug    (there)"),
}
"""What a peer says in place of its report, and what to change."""
_MAKES_PAGES: Final = frozenset({"page_tokens"})
"""Options by which connectors divide KV into pages: they must be equal at both ends."""


@attrs.define(kw_only=True)
class PeerExamination:
    """What was found out about one peer."""

    contact: str
    """Its address."""
    findings: list[Finding] = attrs.field(factory=list)
    fields: tuple[Field, ...] = ()
    host: HostFacts | None = None
    measured: list[Measured] = attrs.field(factory=list)


class _Replayed:
    """The channel of a handshake whose first value was received already."""

    def __init__(self, channel: Channel, first: object) -> None:
        self._channel = channel
        self._first: list[object] = [first]
        self.peer = channel.peer

    def send(self, value: Any, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._channel.send(value, timeout=timeout)

    def recv(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        return self._first.pop() if self._first else self._channel.recv(timeout=timeout)


def examine_peer(
    resolved: ResolvedConfig,
    contact: str,
    device: str,
    facts: Mapping[str, Any],
    deadline: Deadline,
    *,
    own: bool = False,
) -> PeerExamination:
    """Dial, shake hands, ask, measure, and hang up, by the deadline. What goes wrong is a finding.

    Args:
        device: type of the device of the tensors that an engine with this config moves.
        facts: of this side's engine; the others are taken to be the peer's.
        own: the peer is a listener of this process, which has no host of its own.
    """
    found = PeerExamination(contact=contact)
    settings = LinkSettings(resolved=resolved)
    try:
        channel = Channel(dial(contact, settings.credentials, CONTROL, deadline.remaining()))
    except KvplugError as e:
        found.findings.append(unreachable(e, found.contact, resolved.config))
        return found
    with contextlib.closing(channel):
        try:
            _Talk(found, resolved, settings, channel, device, facts, deadline).run(own)
        except KvplugError as e:
            found.findings.append(unreachable(e, found.contact, resolved.config))
    return found


class _Talk:
    """One conversation with a peer that has proved itself."""

    def __init__(
        self,
        found: PeerExamination,
        resolved: ResolvedConfig,
        settings: LinkSettings,
        channel: Channel,
        device: str,
        facts: Mapping[str, Any],
        deadline: Deadline,
    ) -> None:
        self._found = found
        self._resolved = resolved
        self._settings = settings
        self._channel = channel
        self._device = device
        weights = resolved.config.weights
        self._facts = {"weights": weights, **facts} if weights else facts
        self._deadline = deadline

    def _add(self, *findings: Finding) -> None:
        self._found.findings.extend(findings)

    def run(self, own: bool) -> None:
        received = self._channel.recv(timeout=self._deadline.remaining())
        try:
            remote = hello_in(received)
        except HandshakeError as e:
            self._add(*refusals(e.reasons, "the peer"))
            return
        local = self._hello(remote)
        agreement, reasons = self._shake_hands(local, received)
        report = self._report()
        stated = set(self._facts)
        if remote.engine is None and (theirs := facts_from_peer(report.get("facts"))):
            local, remote, reasons = self._compare_facts(local, remote, theirs, reasons)
            stated &= theirs.keys()
        if not own:
            self._found.fields = fields_of(local, remote, reasons, stated)
        self._add(*self._of_agreement(agreement, remote, reasons, stated))
        if not own:
            self._of_host(report)
        if agreement is not None and "host" in report:
            self._measure(agreement, local)
        with contextlib.suppress(KvplugError):
            self._channel.send({"doctor": "bye"}, timeout=0.1)

    def _hello(self, remote: Hello) -> Hello:
        config = self._resolved.config
        engine = None
        if remote.engine is not None:
            engine = engine_with(self._facts, str(config.role or BOTH), remote.engine)
        return make_hello(self._resolved, engine, True, self._device, DOCTOR)

    def _shake_hands(self, local: Hello, received: object) -> tuple[Agreement | None, tuple[str, ...]]:
        try:
            return exchange(_Replayed(self._channel, received), local, self._deadline.remaining()), ()
        except HandshakeError as e:
            return None, e.reasons

    def _compare_facts(
        self, local: Hello, remote: Hello, theirs: Mapping[str, Any], reasons: tuple[str, ...]
    ) -> tuple[Hello, Hello, tuple[str, ...]]:
        """Two doctors without engines: what engines with these facts would say."""
        both = self._facts.keys() & theirs.keys()
        mine = engine_with({key: self._facts[key] for key in both}, BOTH)
        yours = engine_with({key: theirs[key] for key in both}, BOTH)
        local, remote = attrs.evolve(local, engine=mine), attrs.evolve(remote, engine=yours)
        try:
            agree(local, remote)
        except HandshakeError as e:
            reasons = tuple(dict.fromkeys((*reasons, *e.reasons)))
        return local, remote, reasons

    def _of_agreement(
        self, agreement: Agreement | None, remote: Hello, reasons: tuple[str, ...], stated: set[str]
    ) -> Iterator[Finding]:
        who = f"{remote.identity}, engine {remote.engine_id[:12]}" if remote.engine else str(remote.identity)
        if reasons:
            yield from refusals(reasons, who)
            if not any(reason.startswith("transport") for reason in reasons):
                return
            yield from (
                Finding(topic="plugins", verdict="note", what=failure) for failure in self._settings.missing
            )
            return
        if agreement is None:
            return
        yield Finding(topic="handshake", verdict="ok", what=f"agreed with {who}")
        if remote.engine is not None and remote.engine.model.weights.startswith(UNKNOWN_WEIGHTS):
            yield Finding(
                topic="weights",
                verdict="problem",
                what="the peer does not know its model's weights: no other engine can load its KV, nor can it"
                " itself after a restart",
                change=line_for("model.weights"),
            )
        if remote.engine is not None and not stated & MODEL_FACTS - {"weights"}:
            yield Finding(
                topic="model",
                verdict="note",
                what="the model of this side's engine was not given, and was taken to be the peer's",
                why=("so whether the two engines have the same model is not known",),
                change="--fact num_layers=N --fact num_kv_heads=N --fact head_size=N --fact dtype=NAME",
            )
        for text in agreement.converts:
            field = field_of(text)
            yield Finding(
                topic=field,
                verdict="note",
                what=f"{text}: it is converted",
                why=("each page is rearranged when it is copied, which takes longer",),
                change=line_for(field),
            )
        for device, selection in agreement.transports.items():
            chosen, *others = selection.candidates
            yield Finding(
                topic="transport",
                verdict="ok",
                what=f"{device} tensors go by {chosen}",
                why=tuple(str(other) for other in others),
            )

    # -- the peer's answers --------------------------------------------------------------------

    def _report(self) -> Mapping[str, Any]:
        within = self._within()
        try:
            self._channel.send({"doctor": "report"}, timeout=within)
            answered = self._channel.recv(timeout=within)
        except KvplugError:
            return {}
        report = answered.get("report") if isinstance(answered, dict) else None
        return report if isinstance(report, dict) else {}

    def _within(self) -> float:
        left = self._deadline.remaining()
        return _ANSWER_S if left is None else min(left, _ANSWER_S)

    def _of_host(self, report: Mapping[str, Any]) -> None:
        if "host" not in report:
            says, change = _SILENT.get(peer_text(report.get("doctor")), _SILENT[""])
            why = "its limits are not known, and no pipe is measured"
            what = f"the peer tells nothing of its host: {says}"
            self._add(Finding(topic="peer", verdict="note", what=what, why=(why,), change=change))
            return
        self._found.host = theirs = HostFacts.from_plain(report["host"])
        self._add(*findings_of_peer(report.get("findings")))
        self._add(*findings_of_two(facts_of(self._resolved.config), theirs))
        self._add(*_of_connectors(self._resolved.config, report))

    def _measure(self, agreement: Agreement, local: Hello) -> None:
        device = self._device if self._device in agreement.transports else "cpu"
        selection = agreement.transports.get(device)
        if selection is None:
            return
        offers = [
            offer
            for side in (local, agreement.remote)
            for offer in side.transports
            if offer.name == selection.chosen
        ]
        claimed = min(offer.capabilities.cost.gb_per_s for offer in offers)
        try:
            why = lacks_tensors(device) or self._ask_to_measure(device)
            if not why:
                link = ControlLink(self._settings, self._channel, agreement, accepted=False)
                measured = measure(link, device, claimed, self._deadline)
                self._found.measured.append(measured)
                self._add(rate_finding(measured, agreement.cross_host))
                return
        except Exception as e:
            self._add(not_measured(selection.chosen, e, claimed))
            return
        self._add(Finding(topic="rate", verdict="ok", what=f"{selection.chosen}: not measured, since {why}"))

    def _ask_to_measure(self, device: str) -> str:
        """Why the peer does not measure; empty: it does."""
        self._channel.send({"doctor": "measure", "device": device}, timeout=self._within())
        answered = self._channel.recv(timeout=self._deadline.remaining())
        if isinstance(answered, dict) and answered.get("measuring") is True:
            return ""
        return peer_text(answered.get("why")) if isinstance(answered, dict) else "the peer answers otherwise"


def _of_connectors(config: Config, report: Mapping[str, Any]) -> Iterator[Finding]:
    """Where the two engines' connectors, or the options that they were given, differ."""
    name = peer_text(report.get("connector"), 80)
    if name != config.connector:
        yield Finding(
            topic="connector",
            verdict="problem",
            what=f"{config.connector} here, {name} at the peer",
            why=("one connector does not know what another one sends",),
            change=f"connector = {config.connector!r}    (at both ends)",
        )
        return
    ours, theirs = connector_options(config), texts(report.get("options"))
    for key in sorted(ours.keys() | theirs.keys()):
        mine, yours = (side.get(key, "its default") for side in (ours, theirs))
        if mine != yours:
            # Engines refuse each other then; what a default comes to is known to the engine alone.
            is_refused = key in _MAKES_PAGES and key in ours and key in theirs
            yield Finding(
                topic=f"options.{name}.{key}",
                verdict="problem" if is_refused else "note",
                what=f"{mine} here, {yours} at the peer",
                why=("pages are found by both only if what makes them is equal; see the option's help",),
                change=f"options.{name}.{key} = {mine}    (at both ends, if it makes pages)",
            )
