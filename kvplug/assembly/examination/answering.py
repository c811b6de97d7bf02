"""The listener's answers to a doctor: a report of its host, and a measurement.

A doctor reaches neither the connector nor the store behind the listener. The messages after the handshake,
and the answers to them::

    {"doctor": "report"}                    {"report": {"host": ..., "findings": ..., "facts": ...}}
                                            {"report": {"doctor": "off"}}, or "busy"
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
import threading
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvplug.assembly.examination.finding import note
from kvplug.assembly.examination.host import connector_options, facts_of, of_host
from kvplug.assembly.examination.measuring import try_measuring
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.registry import PluginInfo
from kvplug.config.config import Config
from kvplug.errors import KvplugError, PeerGoneError, TimeoutError
from kvplug.net.deadline import Deadline
from kvplug.net.trust.channel import Channel

_log = logging.getLogger(__name__)

_MOST_AT_ONCE: Final = 8
_MOST_S: Final = 30.0
_MOST_QUESTIONS: Final = 16
_BUSY_S: Final = 1.0
"""How long a doctor that is refused, since there are too many, may take to send its question."""

_places = threading.BoundedSemaphore(_MOST_AT_ONCE)


def _after_fork() -> None:
    global _places
    _places = threading.BoundedSemaphore(_MOST_AT_ONCE)


os.register_at_fork(after_in_child=_after_fork)


def report_of(config: Config, missing: tuple[PluginInfo, ...], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The report for a doctor. ``missing``: plugins that are broken or blocked; ``facts``: of the engine."""
    host = facts_of(config)
    findings = list(of_host(host, config))
    if missing:
        what = f"not all are loaded there ({len(missing)} are not), and what they offer is missing"
        # Without the reasons: a plugin's error may hold anything, also of the environment.
        change = "kvplug list    (there; it says why each of them is not loaded)"
        findings.append(note("plugins", what, *(each.label for each in missing), change=change))
    return {
        "host": attrs.asdict(host),
        "findings": [each.to_plain() for each in findings],
        "facts": dict(facts),
        "connector": config.connector,
        "options": connector_options(config),
        "doctor": config.doctor,
    }


def answer(settings: LinkSettings, channel: Channel, link: ControlLink | None) -> None:
    """Answer a doctor until it ends the examination, at most for the config's ``timeout_s`` or 30 s,
    whichever is less.

    ``link``: ``None`` where the handshake was refused.
    """
    deadline = Deadline.after(min(settings.config.timeout_s, _MOST_S))
    places = _places
    is_served = places.acquire(blocking=False)
    _log.info("a doctor connects from %s%s", channel.peer, "" if is_served else "; too many are connected")
    try:
        if is_served:
            _answer_questions(settings, channel, link, deadline)
        else:
            channel.recv(timeout=_BUSY_S)  # an answer before the question might be lost when this end closes
            channel.send({"report": {"doctor": "busy"}}, timeout=_BUSY_S)
    except (PeerGoneError, TimeoutError) as e:
        _log.debug("the doctor from %s is gone: %s", channel.peer, e)
    except KvplugError as e:
        _log.info("the examination by the doctor from %s ends: %s", channel.peer, e)
    except Exception:
        _log.exception("answering the doctor from %s failed: a fault of kvplug or a plugin", channel.peer)
    finally:
        if is_served:
            places.release()


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
        if what == "report" and config.doctor == "off":
            answered = {"report": {"doctor": "off"}}
        elif what == "report":
            answered = {"report": report_of(config, settings.resolved.registry.failed, settings.engine_facts)}
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
