"""A doctor comes to a listener: it is told about this host, whatever came of the handshake, and may measure.

It reaches neither the connector nor the store behind the listener, and holds nothing of theirs. The messages
after the handshake, of which the doctor sends the first::

    {"doctor": "report"}                    {"report": {"host": ..., "findings": ..., "facts": ...}}
    {"doctor": "measure", "device": "cpu"}  {"measuring": true}, then a pipe is opened
                                            {"measuring": false, "why": ...}
    {"doctor": "bye"}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvplug.assembly.examination.finding import Finding
from kvplug.assembly.examination.host import connector_options, facts_of
from kvplug.assembly.examination.limits import findings_of_host
from kvplug.assembly.examination.measuring import try_measuring
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.config import Config
from kvplug.errors import KvplugError, PeerGoneError, TimeoutError
from kvplug.net.deadline import Deadline
from kvplug.net.trust.channel import Channel

_log = logging.getLogger(__name__)


def report_of(config: Config, missing: tuple[str, ...], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a doctor is told. ``missing``: plugins that are broken or blocked; ``facts``: of the engine."""
    host = facts_of(config)
    findings = list(findings_of_host(host, config))
    if missing:
        what = f"not all are loaded there ({len(missing)} are not), and what they offer is missing"
        change = "pip install --upgrade NAME    (or take NAME out of KVPLUG_DISABLE_PLUGINS)"
        findings.append(Finding(topic="plugins", verdict="note", what=what, why=missing, change=change))
    return {
        "host": host.to_plain(),
        "findings": [each.to_plain() for each in findings],
        "facts": dict(facts),
        "connector": config.connector,
        "options": connector_options(config),
        "doctor": config.doctor,
    }


def answer(settings: LinkSettings, channel: Channel, link: ControlLink | None) -> None:
    """Answer a doctor until it says goodbye, at most for the config's ``timeout_s``.

    ``link``: ``None`` where the handshake was refused.
    """
    config, deadline = settings.config, Deadline.after(settings.config.timeout_s)
    _log.info("a doctor comes from %s", channel.peer)
    try:
        while True:
            asked = channel.recv(timeout=deadline.remaining())
            what = asked.get("doctor") if isinstance(asked, dict) else None
            if what == "report" and config.doctor == "off":
                channel.send({"report": {"doctor": "off"}}, timeout=deadline.remaining())
            elif what == "report":
                report = report_of(config, settings.missing, settings.engine_facts)
                channel.send({"report": report}, timeout=deadline.remaining())
            elif what == "measure":
                _measured(config, channel, link, asked.get("device"), deadline)
            else:
                return
    except (PeerGoneError, TimeoutError) as e:
        _log.debug("the doctor from %s is gone: %s", channel.peer, e)
    except KvplugError as e:
        _log.info("the doctor from %s is not answered any more: %s", channel.peer, e)
    except Exception:
        _log.exception("answering the doctor from %s failed: a fault of kvplug or a plugin", channel.peer)


def _measured(
    config: Config, channel: Channel, link: ControlLink | None, device: object, deadline: Deadline
) -> None:
    why = ""
    if config.doctor != "measure":
        why = f"doctor is {config.doctor!r} in its configuration"
    elif link is None:
        why = "the handshake was refused"
    elif device not in link.agreement.transports:
        why = "no pipe was agreed on"
    elif device != "cpu" and link.agreement.remote.engine is not None:
        why = "an engine's device memory is left alone; `kvplug bench` measures it"
    else:
        why = try_measuring(link, str(device), deadline)
    if why:
        channel.send({"measuring": False, "why": why}, timeout=deadline.remaining())
