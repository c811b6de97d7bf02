"""What ``kvplug explain`` and ``kvplug doctor`` found: what it is, why it matters, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import attrs

from kvplug.config.messages import Fault
from kvplug.errors import Reason
from kvplug.net.peer_text import peer_text

Verdict = Literal["ok", "note", "problem"]

_MAX_FINDINGS: Final = 64
_MAX_REASONS: Final = 16
_MAX_CHARACTERS: Final = 400
"""Bounds of what is taken from a peer: findings, reasons of one finding, characters of a text."""


@attrs.frozen(kw_only=True)
class Finding:
    """The result of one check."""

    topic: str
    """The key of the config, or the part of kvplug or of the host, that was checked."""
    verdict: Verdict
    """``"problem"``: an engine does not start, or loads nothing, or far too slowly, until it is changed."""
    what: str
    why: tuple[str, ...] = ()
    """The consequences, and what else was considered."""
    change: str = ""
    """A line of the config, an option of an engine, or a command; empty where nothing must be changed."""
    at: Literal["here", "peer"] = "here"

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for the wire and for JSON."""
        return {**attrs.asdict(self), "why": list(self.why)}


def ok(topic: str, what: str, *why: str) -> Finding:
    return Finding(topic=topic, verdict="ok", what=what, why=why)


def note(topic: str, what: str, *why: str, change: str = "") -> Finding:
    return Finding(topic=topic, verdict="note", what=what, why=why, change=change)


def problem(topic: str, what: str, *why: str, change: str = "") -> Finding:
    return Finding(topic=topic, verdict="problem", what=what, why=why, change=change)


def from_fault(text: str) -> Finding:
    """The problem that a fault of a config is."""
    fault = Fault.of(text)
    return problem(fault.key or "config", fault.removeprefix(f"{fault.key}: "), change=fault.line)


def from_reasons(reasons: tuple[str, ...], peer: str) -> tuple[Finding, ...]:
    """The problems that the reasons of a refused handshake are. A transport that was considered belongs to
    the reason before it, which says that none can be used."""
    found: list[Finding] = []
    for reason in reasons:
        if not isinstance(reason, Reason):  # from the peer
            change = "pip install --upgrade kvplug    (the same version at both ends)"
            found.append(problem("handshake", f"refused with {peer}: {reason}", change=change))
        elif found and not reason.change:
            why = (*found[-1].why, reason.removeprefix("transport "))
            found[-1] = attrs.evolve(found[-1], why=why)
        else:
            what = f"refused with {peer}: {reason.what}"
            found.append(problem(reason.field, what, change=reason.change))
    return tuple(found)


def from_peer(plain: object) -> tuple[Finding, ...]:
    """The findings in a peer's report, as text that a terminal can show; malformed ones are left out."""
    found = []
    for each in plain[:_MAX_FINDINGS] if isinstance(plain, list) else ():
        if isinstance(each, Mapping) and peer_text(each.get("verdict")) in get_args(Verdict):
            why = each.get("why")
            found.append(
                Finding(
                    topic=peer_text(each.get("topic"), 40),
                    verdict=each["verdict"],
                    what=peer_text(each.get("what"), _MAX_CHARACTERS),
                    why=tuple(
                        peer_text(reason, _MAX_CHARACTERS)
                        for reason in (why[:_MAX_REASONS] if isinstance(why, list) else ())
                    ),
                    change=peer_text(each.get("change"), _MAX_CHARACTERS),
                    at="peer",
                )
            )
    return tuple(found)


def line_for_resource(resource: str) -> str:
    """The command that raises the limit of a resource that has run out."""
    lines = {
        "descriptors": "ulimit -n 65536",
        "threads": "ulimit -u unlimited    (or a higher pids.max of the container)",
        "memory": "ulimit -v unlimited    (or more memory for the container)",
        "space": "ulimit -f unlimited, or room on the file system",
    }
    return lines.get(resource, "ulimit -a    (shows the limits of a shell)")
