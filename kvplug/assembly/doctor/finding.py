"""Findings of ``kvplug explain`` and ``kvplug doctor``: the fact, why it matters, and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import attrs

from kvplug.config.messages import Fault
from kvplug.errors import ConfigError, KvplugError, Reason, ResourceExhaustedError

LINE_FOR_RESOURCE: Final = {
    "descriptors": "ulimit -n 65536",
    "threads": "ulimit -u unlimited    (or a higher pids.max of the container)",
    "memory": "ulimit -v unlimited    (or more memory for the container)",
    "space": "ulimit -f unlimited, or room on the file system",
}
"""The command that raises the limit of a resource that has run out."""


@attrs.frozen(kw_only=True)
class Finding:
    """The result of one check."""

    topic: str
    """The config key, or the part of kvplug or the host, that was checked."""
    verdict: Literal["ok", "note", "problem"]
    """``"problem"``: until it is fixed, an engine does not start, or loads KV too slowly or not at all."""
    what: str
    why: tuple[str, ...] = ()
    """The consequences, and the alternatives that were considered."""
    change: str = ""
    """A config line, an engine option or a command; empty if nothing must be changed."""
    at: Literal["here", "peer"] = "here"


def ok(topic: str, what: str, *why: str) -> Finding:
    return Finding(topic=topic, verdict="ok", what=what, why=why)


def note(topic: str, what: str, *why: str, change: str = "") -> Finding:
    return Finding(topic=topic, verdict="note", what=what, why=why, change=change)


def problem(topic: str, what: str, *why: str, change: str = "") -> Finding:
    return Finding(topic=topic, verdict="problem", what=what, why=why, change=change)


def judged(
    topic: str, what: str, why: str, *, change: str, wrong: bool = False, doubtful: bool = False
) -> Finding:
    """Return a problem if ``wrong``, a note if only ``doubtful``, and otherwise a finding that is ok."""
    if not wrong and not doubtful:
        return ok(topic, what)
    return (problem if wrong else note)(topic, what, why, change=change)


def text_of(error: Exception) -> str:
    """Return an error's text, preceded by its class unless it is kvplug's own."""
    return str(error) if isinstance(error, KvplugError) else f"{type(error).__name__}: {error}"


def from_error(topic: str, error: Exception, change: str, what: str = "") -> Finding:
    """Turn an error into a problem whose text begins with ``what``."""
    if isinstance(error, ResourceExhaustedError):
        topic, change = error.resource, LINE_FOR_RESOURCE.get(error.resource, change)
    return problem(topic, f"{what}{text_of(error)}", change=change)


def not_checked(topic: str, what: str, topics: Iterable[str]) -> Finding:
    """Return a note that a check was skipped because of problems with these topics."""
    return note(topic, f"{what}, because of the problem of {' and '.join(topics) or 'the config'}")


def faulty_keys(error: ConfigError) -> tuple[str, ...]:
    """Return the keys that an error's faults name."""
    return tuple(dict.fromkeys(filter(None, (Fault.of(each).key for each in error.faults))))


def from_fault(text: str) -> Finding:
    """Turn a fault of a config into a problem."""
    fault = Fault.of(text)
    return problem(fault.key or "config", fault.removeprefix(f"{fault.key}: "), change=fault.line)


def from_reasons(reasons: tuple[str, ...], peer: str) -> tuple[Finding, ...]:
    """Turn the reasons of a refused handshake into problems.

    A reason about one transport is added to the preceding problem, which reports that no transport fits.
    """
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
