"""Shakes hands with a peer as an engine would, asks it about its host, and measures the agreed pipe."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import attrs

from kvplug.assembly.doctor.diagnosis import Examination
from kvplug.assembly.doctor.facts import FACTS, MODEL_FACTS, Facts, engine_with, read_facts
from kvplug.assembly.doctor.finding import (
    Finding,
    from_error,
    from_reasons,
    judged,
    not_checked,
    note,
    ok,
    problem,
)
from kvplug.assembly.doctor.host import of_limits, of_two_hosts
from kvplug.assembly.examination import Measured, Report, connector_options, measure
from kvplug.assembly.host import secret_source
from kvplug.assembly.links import CONTROL, ControlLink, LinkSettings
from kvplug.assembly.resolve import ResolvedConfig, make_hello
from kvplug.config.config import Config, Role
from kvplug.engine.layout import PAGE_TOKENS
from kvplug.errors import (
    HandshakeError,
    InsecureAddressError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
)
from kvplug.metrics.rate import host_load
from kvplug.negotiation.agreement import Agreement, agree
from kvplug.negotiation.exchange import exchange, hello_in
from kvplug.negotiation.hello import DOCTOR, EngineFacts, Hello
from kvplug.negotiation.model import UNKNOWN_WEIGHTS
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection

_NO_REPORT: Final = {
    "off": ("doctor is 'off' in its configuration", 'doctor = "measure"    (at the peer)'),
    "busy": ("it already serves too many doctors", "kvplug doctor    (again, when the others are done)"),
    "": ("its kvplug may be older", "pip install --upgrade kvplug    (there)"),
}
"""For each word that a peer sends instead of its report: its meaning, and what to change."""
_PAGE_TOKENS: Final = "page_tokens"
"""The option for the size of a connector's pages. It must be equal at both ends."""
_DEFAULT: Final = "its default"
_SLOW: Final = 10.0
"""The ratio of claimed to measured rate that gets a note. Claims hold for common hardware: 2 is normal."""
_FAR_TOO_SLOW: Final = 50.0


def of_peer(examination: Examination, contact: str, *, measures: bool = True) -> Iterator[Finding]:
    """Examine the peer at this contact: dial, shake hands, request its report, measure, and hang up.

    ``measures``: whether the pipe is opened and measured.
    """
    resolved, deadline = examination.resolved, examination.deadline
    if topics := examination.faulty_for_links():
        yield not_checked("peer", f"{contact}: not examined", topics)
        return
    try:
        connection = Connection.dial(contact, resolved.credentials, CONTROL, deadline.remaining())
        with contextlib.closing(Channel(connection)) as channel:
            yield from _examined(examination, channel, measures)
            with contextlib.suppress(KvplugError):
                channel.send({"doctor": "bye"}, timeout=0.1)
    except KvplugError as e:
        yield _unreachable(e, contact, resolved.config)


def _examined(examination: Examination, channel: Channel, measures: bool) -> Iterator[Finding]:
    resolved, deadline, facts = examination.resolved, examination.deadline, examination.facts
    config = resolved.config
    received = channel.recv(timeout=deadline.remaining())
    remote = hello_in(received)
    theirs = remote.engine
    if config.weights:
        facts = {"weights": config.weights, **facts}
    ours = None if theirs is None else engine_with(facts, config.role or Role.BOTH, theirs)
    if ours is not None:
        yield from of_pages(config, ours.block_size, ours.block_format)
    local = make_hello(resolved, ours, True, resolved.device_of_links, DOCTOR)
    agreement: Agreement | None = None
    reasons: tuple[str, ...] = ()
    try:
        agreement = exchange(channel, local, deadline.remaining(), received=received)
    except HandshakeError as e:
        reasons = e.reasons
    report = Report.request(channel, deadline)
    stated: Collection[str] = FACTS
    if theirs is None:
        their_facts = read_facts(f"{key}={value}" for key, value in report.facts.items() if key in FACTS)
        stated = their_facts.keys()
        reasons = tuple(dict.fromkeys((*reasons, *_differing((local, remote), (facts, their_facts)))))
    if reasons:
        engine = "" if theirs is None else f", engine {remote.engine_id[:12]}"
        yield from _refusals(resolved, reasons, f"{remote.identity}{engine}")
    elif agreement is not None:
        yield from _agreed(agreement, theirs)
        if theirs is not None or stated:
            yield _compared(facts.keys() & stated)
    if report.host is None:
        reason, change = _NO_REPORT.get(report.doctor, _NO_REPORT[""])
        what = f"the peer does not report its host: {reason}"
        yield note("peer", what, "its limits are unknown, and no pipe is measured", change=change)
        return
    examination.found.peer_host = report.host
    for each in of_limits(report.host, report.buffer_size):
        yield attrs.evolve(each, at="peer")
    if report.missing:
        what = f"{len(report.missing)} are not loaded, so what they offer is missing"
        missing = note("plugins", what, *report.missing, change="kvplug list    (there; it shows why)")
        yield attrs.evolve(missing, at="peer")
    yield from of_two_hosts(examination.host, report.host)
    yield from _connectors(config, report, theirs)
    if measures and agreement is not None:
        link = ControlLink(LinkSettings(resolved=resolved), channel, agreement, accepted=False)
        yield from of_rate(examination, link)


def _differing(hellos: tuple[Hello, Hello], facts: tuple[Facts, Facts]) -> tuple[str, ...]:
    """Return why engines with these facts, which are not running, would refuse each other. Facts that only
    one end states are not compared."""
    both = facts[0].keys() & facts[1].keys()
    engines = (engine_with({key: each[key] for key in both}, Role.BOTH) for each in facts)
    local, remote = (
        attrs.evolve(hello, engine=engine) for hello, engine in zip(hellos, engines, strict=True)
    )
    try:
        agree(local, remote)
    except HandshakeError as e:
        return e.reasons
    return ()


def _refusals(resolved: ResolvedConfig, reasons: tuple[str, ...], who: str) -> Iterator[Finding]:
    """Yield the reasons as problems. If no transport fits, also suggest plugins that are not loaded."""
    for each in from_reasons(reasons, who):
        if each.topic == "transport" and resolved.registry.failed:
            more = (
                "or a plugin: take it out of KVPLUG_DISABLE_PLUGINS, or see why it is broken in `kvplug list`"
            )
            each = attrs.evolve(each, change=f"{each.change}; {more}")
        yield each


def _compared(facts: Collection[str]) -> Finding:
    """Name the facts that both ends state; the others count as equal."""
    others = [each for each in FACTS if each not in facts]
    if any(each in facts for each in MODEL_FACTS if each != "weights"):
        return ok("model", f"compared: {', '.join(sorted(facts))}; not compared: {', '.join(others)}")
    return note(
        "model",
        "the model of this side's engine was not stated, and was assumed to be the peer's",
        "whether the two engines have the same model is therefore unknown",
        change="--fact num_layers=N --fact num_kv_heads=N --fact head_size=N --fact dtype=NAME",
    )


def _agreed(agreement: Agreement, theirs: EngineFacts | None) -> Iterator[Finding]:
    """Yield what was agreed on, and what must be converted."""
    yield ok("handshake", f"agreed with {agreement.remote.identity}")
    if theirs is not None and theirs.model.weights.startswith(UNKNOWN_WEIGHTS):
        yield problem(
            "weights",
            "the peer does not know its model's weights: no other engine can load its KV, and neither can the"
            " peer itself after a restart",
            change='weights = "NAME at REVISION"    (at both ends, if their weights are the same)',
        )
    for each in agreement.converts:
        yield note(
            each.field,
            f"{each.what}: it is converted",
            "each page is rearranged when it is copied, which takes longer",
            change=f"{each.field}: the same at both ends",
        )
    for device, selection in agreement.transports.items():
        chosen, *others = selection.candidates
        yield ok("transport", f"{device} tensors go by {chosen}", *map(str, others))


# -- connectors ------------------------------------------------------------------------------------------


def of_pages(config: Config, block_size: int, block_format: str) -> Iterator[Finding]:
    """Check that each page has a whole number of blocks, if the engine's blocks cannot be divided."""
    tokens = connector_options(config).get(_PAGE_TOKENS, "")
    key = f"options.{config.connector}.{_PAGE_TOKENS}"
    if block_format and tokens.isdecimal() and int(tokens) % block_size:
        yield problem(
            key,
            f"a page has {tokens} tokens, and a block of the order {block_format!r} has {block_size}",
            "the engine does not start: there, a page must be a multiple of a block",
            change=f"{key} = {-(-int(tokens) // block_size) * block_size}",
        )


def _connectors(config: Config, report: Report, theirs: EngineFacts | None) -> Iterator[Finding]:
    """Compare the two engines' connectors and their configured options."""
    name = report.connector
    if name != config.connector:
        yield problem(
            "connector",
            f"{config.connector} here, {name} at the peer",
            "a connector cannot read what another connector sends",
            change=f"connector = {config.connector!r}    (at both ends)",
        )
        return
    sides = connector_options(config), report.options
    for option in sorted({*sides[0], *sides[1]}):
        values = [side.get(option, _DEFAULT) for side in sides]
        if option == _PAGE_TOKENS and theirs is not None:
            block = theirs.block_size if theirs.block_format else 1
            values = [side.get(option, str(math.ceil(PAGE_TOKENS / block) * block)) for side in sides]
        mine, yours = values
        if mine != yours:
            # Engines whose page sizes differ refuse each other. Only an engine knows its default size.
            make = problem if option == _PAGE_TOKENS and _DEFAULT not in values else note
            value = yours if mine == _DEFAULT else mine
            yield make(
                f"options.{name}.{option}",
                f"{mine} here, {yours} at the peer",
                "both ends find pages only if the options that make them are equal; see the option's help",
                change=f"options.{name}.{option} = {value}    (at both ends, if it makes pages)",
            )


# -- the rate of the pipe --------------------------------------------------------------------------------


def of_rate(examination: Examination, link: ControlLink) -> Iterator[Finding]:
    """Measure the agreed pipe, and compare its rate with the claim of its transport."""
    resolved, agreement = examination.resolved, link.agreement
    device = resolved.device_of_links if resolved.device_of_links in agreement.transports else "cpu"
    if device not in agreement.transports:
        return
    chosen = agreement.transports[device].chosen
    offers = (*resolved.offers(load=False), *agreement.remote.transports)
    claimed = min(offer.capabilities.cost.gb_per_s for offer in offers if offer.name == chosen)
    try:
        measured = measure(link, device, claimed, examination.deadline)
    except Exception as e:
        is_late = isinstance(e, TimeoutError)
        what = "no message came in time" if is_late else "the agreed pipe cannot be opened or used"
        yield problem(
            "rate",
            f"{chosen}: {what}; {claimed:g} GB/s are claimed",
            f"{type(e).__name__}: {e}",
            change='transport = "cpu"    (at both ends, to find out whether another one works)',
        )
        return
    if isinstance(measured, str):
        yield ok("rate", f"{chosen}: not measured, since {measured}")
    else:
        examination.found.measured.append(measured)
        yield rate_finding(measured, agreement.cross_host)


def rate_finding(measured: Measured, cross_host: bool, load: float | None = None) -> Finding:
    """Compare a pipe's rate with the claim.

    Args:
        load: runnable processes per CPU; default: this host's.
    """
    load = host_load() if load is None else load
    # Each hand-over between the two ends waits for a CPU, and each message needs several hand-overs.
    allowed = (1 + load) ** 2 if load > 1 else 1.0
    factor = measured.claimed_gb_per_s / measured.gb_per_s
    what = (
        f"{measured.transport}: {measured.gb_per_s:.3g} GB/s measured with {measured.num_bytes >> 20} MiB of"
        f" {measured.device} tensors, {measured.claimed_gb_per_s:g} GB/s claimed"
    )
    if load > 1:
        what += f"; this host is busy, with {load:.1f} processes for each CPU"
    why = "a wrapper of the pipe, the memory, or the CPUs that the processes may use are slow"
    change = "kvplug bench    (measures every transport here for longer)"
    if cross_host:
        why = "the network between the hosts, or the route through it, is too slow"
        change = "host: an address of the fastest network; see `interfaces`"
    wrong = factor >= _FAR_TOO_SLOW * allowed and not cross_host
    return judged("rate", what, why, change=change, wrong=wrong, doubtful=factor >= _SLOW * allowed)


# -- errors ----------------------------------------------------------------------------------------------

_ADDRESS: Final = '--peer, peers: the address in the engine\'s log ("listening for peers at")'
_EXPLAINED: Final[Mapping[str, tuple[str, str]]] = {
    "certificate name": (
        "tls",
        "tls_cert: one with HOST as subjectAltName (there); or tls_check_host = false",
    ),
    "certificate": ("tls", "tls_ca, tls_cert: signed by one authority at both ends, and not expired"),
    "tls": ("tls", "tls_cert, tls_key, tls_ca: at both ends, with one authority; or at neither"),
    "foreign": ("peer", _ADDRESS),
    "hung up": ("peer", f"{_ADDRESS}; tls_cert, tls_key and tls_ca at both ends"),
    "no route": ("peer", "docker run --network=host    (or a route to HOST)"),
    "InsecureAddressError": (
        "secret",
        "secret_file: what `kvplug config secret FILE` prints    (the same file at both ends)",
    ),
    "AuthenticationError": (
        "secret",
        "KVPLUG_SECRET or secret_file: the same at both ends; or one user at both ends, on one host",
    ),
    "TimeoutError": (
        "peer",
        "kill -CONT PID at the peer if it is stopped, or a firewall rule that drops packets",
    ),
    "PeerGoneError": ("peer", _ADDRESS),
    "ConfigError": ("tls", "tls_cert, tls_key, tls_ca"),
    "WireError": ("peer", "--peer ADDRESS:PORT, unix:@NAME or unix:/PATH"),
    "KvplugError": ("peer", ""),
}
"""For each error code or error class: the topic, and what to change."""


def _unreachable(error: KvplugError, contact: str, config: Config) -> Finding:
    """Explain to an operator an error from dialling, or from the conversation that followed."""
    if isinstance(error, HandshakeError):
        return from_reasons(error.reasons, "the peer")[0]
    names = (error.code, *(cls.__name__ for cls in type(error).__mro__))
    topic, change = next(_EXPLAINED[name] for name in names if name in _EXPLAINED)
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
    host = contact.rpartition(":")[0] or contact
    found = from_error(topic, error, change.replace("HOST", host), f"{contact}: ")
    return attrs.evolve(found, why=tuple(why))
