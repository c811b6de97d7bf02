"""The listener's answers to a doctor: a report of its host, and a measurement.

A doctor reaches neither the connector nor the store behind the listener. The messages after the handshake,
and the answers to them::

    {"doctor": "report"}                    {"report": a Report}
    {"doctor": "measure", "device": "cpu"}  {"measuring": true}, then a pipe is opened
                                            {"measuring": false, "why": ...}
    {"doctor": "bye"}
    {"doctor": anything else}               {"unknown": true}: a newer doctor can continue

The load that doctors put on an engine is bounded: 8 examinations at one time, each for at most 30 seconds,
with at most 16 questions and one measurement.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import attrs

from kvplug.assembly.examination.checks import of_host
from kvplug.assembly.examination.finding import Finding, note
from kvplug.assembly.examination.measuring import try_measuring
from kvplug.assembly.host import HostFacts, facts_of
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.config.config import Config
from kvplug.errors import KvplugError
from kvplug.net.deadline import Deadline
from kvplug.net.peer_text import peer_texts
from kvplug.net.trust.channel import Channel
from kvplug.net.wire import from_plain, to_plain

_log = logging.getLogger(__name__)

_MOST_AT_ONCE: Final = 8
_MOST_S: Final = 30.0
_MOST_QUESTIONS: Final = 16
_BUSY_S: Final = 1.0
"""How long a doctor that is refused, since there are too many, may take to send its question."""

_MAX_CHARACTERS: Final = 400
"""Of a text of a peer's report."""
_SECRET: Final = re.compile(
    r"(secret|passw(or)?d|pwd|passphrase|credential|auth|token|key)s?$", re.IGNORECASE
)
"""Ends of the names of options whose values may be secret."""
_HARMLESS: Final = re.compile(r"[\w .%+-]{0,40}")
"""Values of options that are sent: numbers, sizes and words. A path, an address or a URL does not match."""

_places = threading.BoundedSemaphore(_MOST_AT_ONCE)

os.register_at_fork(after_in_child=partial(_places.__init__, _MOST_AT_ONCE))  # type: ignore[misc]


@attrs.frozen(kw_only=True)
class Report:
    """What a listener tells a doctor."""

    doctor: str
    """The config's ``doctor``, or ``"busy"``."""
    host: HostFacts | None = None
    """``None``: the rest is not told either."""
    findings: tuple[Finding, ...] = ()
    """Of that host."""
    facts: Mapping[str, str | int] = attrs.field(factory=dict)
    """Of an engine that does not run."""
    connector: str = ""
    options: Mapping[str, str] = attrs.field(factory=dict)
    """Those of the connector that are given."""

    @classmethod
    def of(cls, settings: LinkSettings) -> Report:
        """The report of this process."""
        config, missing = settings.config, settings.resolved.registry.failed
        if config.doctor == "off":
            return cls(doctor=config.doctor)
        host = facts_of(config)
        findings = [*of_host(host, config)]
        if missing:
            what = f"not all are loaded there ({len(missing)} are not), and what they offer is missing"
            # Without the reasons: a plugin's error may hold anything, also of the environment.
            change = "kvplug list    (there; it says why each of them is not loaded)"
            findings.append(note("plugins", what, *(each.label for each in missing), change=change))
        return cls(
            doctor=config.doctor,
            host=host,
            findings=tuple(findings),
            facts=settings.engine_facts,
            connector=config.connector,
            options=connector_options(config),
        )

    @classmethod
    def from_peer(cls, plain: object) -> Report:
        """A peer's report, with texts that a terminal can show.

        Raises:
            WireError: it is something else.
        """
        found = from_plain(peer_texts(plain, _MAX_CHARACTERS), cls, "the report")
        return attrs.evolve(found, findings=tuple(attrs.evolve(each, at="peer") for each in found.findings))


def connector_options(config: Config) -> dict[str, str]:
    """What the config gives its connector, as text. A value that may be a secret or a place is "(given)"."""
    given = config.options.get(config.connector.rpartition(":")[2], {})

    def shown(key: str, text: str) -> str:
        is_count = key.endswith("_tokens") and text.isdecimal()
        return text if is_count or (_HARMLESS.fullmatch(text) and not _SECRET.search(key)) else "(given)"

    return {key: shown(key, str(value)) for key, value in given.items()}


def answer(settings: LinkSettings, channel: Channel, link: ControlLink | None) -> None:
    """Answer a doctor until it ends the examination, at most for the config's ``timeout_s`` or 30 s,
    whichever is less.

    ``link``: ``None`` where the handshake was refused.
    """
    deadline = Deadline.after(min(settings.config.timeout_s, _MOST_S))
    is_served = _places.acquire(blocking=False)
    _log.info("a doctor connects from %s%s", channel.peer, "" if is_served else "; too many are connected")
    try:
        if is_served:
            _answer_questions(settings, channel, link, deadline)
        else:
            channel.recv(timeout=_BUSY_S)  # an answer before the question might be lost when this end closes
            channel.send({"report": to_plain(Report(doctor="busy"))}, timeout=_BUSY_S)
    except KvplugError as e:
        _log.info("the examination by the doctor from %s ends: %s", channel.peer, e)
    finally:
        if is_served:
            _places.release()


def _answer_questions(
    settings: LinkSettings, channel: Channel, link: ControlLink | None, deadline: Deadline
) -> None:
    config, is_measured = settings.config, False
    for _ in range(_MOST_QUESTIONS):
        asked = channel.recv(timeout=deadline.remaining())
        what = asked.get("doctor") if isinstance(asked, dict) else None
        if not isinstance(what, str) or what == "bye":
            return
        answered: dict[str, Any] = {"unknown": True}
        if what == "report":
            answered = {"report": to_plain(Report.of(settings))}
        elif what == "measure":
            why = _why_not_measured(config, link, asked.get("device"), is_measured)
            if not why and link is not None:
                is_measured = True
                why = try_measuring(link, asked["device"], deadline)
                if not why:
                    continue
            answered = {"measuring": False, "why": why}
        channel.send(answered, timeout=deadline.remaining())


def _why_not_measured(config: Config, link: ControlLink | None, device: object, is_measured: bool) -> str:
    """Why this doctor gets no measurement; empty: it does."""
    if config.doctor != "measure":
        return f"doctor is {config.doctor!r} in its configuration"
    if link is None:
        return "the handshake was refused"
    if not isinstance(device, str) or device not in link.agreement.transports:
        return "no pipe was agreed on"
    if device != "cpu" and link.agreement.remote.engine is not None:
        return "an engine's device memory is left alone; `kvplug bench` measures it"
    return "it was measured already" if is_measured else ""
