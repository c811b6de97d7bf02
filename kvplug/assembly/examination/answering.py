"""The listener's answers to a doctor: a report of its host, and a measurement.

A doctor cannot reach the connector or the store behind the listener. These are the messages after the
handshake, with their answers::

    {"doctor": "report"}                    {"report": a Report}
    {"doctor": "measure", "device": "cpu"}  {"measuring": true}, then a pipe is opened
                                            {"measuring": false, "why": ...}
    {"doctor": "bye"}
    {"doctor": anything else}               {"unknown": true}: a newer doctor can continue

The load that doctors put on an engine is bounded: 8 concurrent examinations, each with at most 30 seconds, 16
questions and one measurement.
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
"""How long a doctor that is refused because others are served may take to send its question."""

_MAX_CHARACTERS: Final = 400
"""The longest text accepted in a peer's report."""
_SECRET: Final = re.compile(
    r"(secret|passw(or)?d|pwd|passphrase|credential|auth|token|key)s?$", re.IGNORECASE
)
"""Matches the end of an option's name if the value may be secret."""
_HARMLESS: Final = re.compile(r"[\w .%+-]{0,40}")
"""Matches option values that may be sent: numbers, sizes and words, but not paths, addresses or URLs."""

_places = threading.BoundedSemaphore(_MOST_AT_ONCE)

os.register_at_fork(after_in_child=partial(_places.__init__, _MOST_AT_ONCE))  # type: ignore[misc]


@attrs.frozen(kw_only=True)
class Report:
    """A listener's report to a doctor."""

    doctor: str
    """The config's ``doctor``, or ``"busy"``."""
    host: HostFacts | None = None
    """``None`` if the listener does not report; the other fields are then empty."""
    findings: tuple[Finding, ...] = ()
    """The findings about that host."""
    facts: Mapping[str, str | int] = attrs.field(factory=dict)
    """The facts of an engine that is not running."""
    connector: str = ""
    options: Mapping[str, str] = attrs.field(factory=dict)
    """The options that the config gives the connector."""

    @classmethod
    def of(cls, settings: LinkSettings) -> Report:
        """Make the report of this process."""
        config, missing = settings.config, settings.resolved.registry.failed
        if config.doctor == "off":
            return cls(doctor=config.doctor)
        host = facts_of(config)
        findings = [*of_host(host, config)]
        if missing:
            what = f"{len(missing)} are not loaded there, so what they offer is missing"
            # The reasons are left out: a plugin's error may contain anything, such as environment variables.
            change = "kvplug list    (there; it shows why each of them is not loaded)"
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
        """Decode a peer's report, and make its texts safe for a terminal.

        Raises:
            WireError: ``plain`` is not a report.
        """
        found = from_plain(peer_texts(plain, _MAX_CHARACTERS), cls, "the report")
        return attrs.evolve(found, findings=tuple(attrs.evolve(each, at="peer") for each in found.findings))


def connector_options(config: Config) -> dict[str, str]:
    """Return the connector's configured options as text. A value that may be a secret or a location becomes
    "(given)"."""
    given = config.options.get(config.connector.rpartition(":")[2], {})

    def shown(key: str, text: str) -> str:
        is_count = key.endswith("_tokens") and text.isdecimal()
        return text if is_count or (_HARMLESS.fullmatch(text) and not _SECRET.search(key)) else "(given)"

    return {key: shown(key, str(value)) for key, value in given.items()}


def answer(settings: LinkSettings, channel: Channel, link: ControlLink | None) -> None:
    """Answer a doctor until it ends the examination, for at most the config's ``timeout_s`` or 30 s,
    whichever is less.

    ``link`` is ``None`` if the handshake was refused.
    """
    deadline = Deadline.after(min(settings.config.timeout_s, _MOST_S))
    is_served = _places.acquire(blocking=False)
    _log.info("a doctor connects from %s%s", channel.peer, "" if is_served else "; too many are connected")
    try:
        if is_served:
            _answer_questions(settings, channel, link, deadline)
        else:
            channel.recv(timeout=_BUSY_S)  # an answer sent before the question could be lost on closing
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
    """Return why this doctor does not get a measurement; empty if it does."""
    if config.doctor != "measure":
        return f"doctor is {config.doctor!r} in its configuration"
    if link is None:
        return "the handshake was refused"
    if not isinstance(device, str) or device not in link.agreement.transports:
        return "the handshake did not agree on a pipe"
    if device != "cpu" and link.agreement.remote.engine is not None:
        return "a doctor does not use an engine's device memory; `kvplug bench` measures it"
    return "it was measured already" if is_measured else ""
