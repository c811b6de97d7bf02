"""Findings of ``kvplug explain`` and ``kvplug doctor``: the fact, why it matters, and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

import attrs

from kvplug.assembly.doctor.facts import Facts
from kvplug.assembly.examination import Measured
from kvplug.assembly.host import HostFacts
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.config.config import Config
from kvplug.config.messages import Fault
from kvplug.errors import ConfigError, KvplugError, Reason, ResourceExhaustedError
from kvplug.net.deadline import Deadline

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
    """The consequences, and what else was considered."""
    change: str = ""
    """A config line, an engine option or a command; empty if nothing must be changed."""
    at: Literal["here", "peer"] = "here"


def ok(topic: str, what: str, *why: str) -> Finding:
    return Finding(topic=topic, verdict="ok", what=what, why=why)


def note(topic: str, what: str, *why: str, change: str = "") -> Finding:
    return Finding(topic=topic, verdict="note", what=what, why=why, change=change)


def problem(topic: str, what: str, *why: str, change: str = "") -> Finding:
    return Finding(topic=topic, verdict="problem", what=what, why=why, change=change)


def text_of(error: Exception) -> str:
    """Return an error's text, preceded by its class unless it is kvplug's own."""
    return str(error) if isinstance(error, KvplugError) else f"{type(error).__name__}: {error}"


def from_error(topic: str, error: Exception, change: str, what: str = "") -> Finding:
    """Turn an error into a problem whose text begins with ``what``."""
    if isinstance(error, ResourceExhaustedError):
        topic, change = error.resource, LINE_FOR_RESOURCE.get(error.resource, change)
    return problem(topic, f"{what}{text_of(error)}", change=change)


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


@attrs.define(kw_only=True)
class Diagnosis:
    """Everything that the doctor found."""

    findings: list[Finding] = attrs.field(factory=list)
    measured: list[Measured] = attrs.field(factory=list)
    host: HostFacts | None = None
    peer_host: HostFacts | None = None

    @property
    def problems(self) -> int:
        return sum(finding.verdict == "problem" for finding in self.findings)

    def to_plain(self) -> dict[str, Any]:
        """Convert to plain values, for JSON."""
        return {"problems": self.problems, **attrs.asdict(self)}

    def collect(self, topic: str, findings: Iterable[Finding]) -> None:
        """Add findings. An error that interrupts them becomes a problem, unless it is already listed."""
        try:
            for each in findings:
                self.findings.append(each)
        except ConfigError as e:
            known = {(each.topic, each.what) for each in self.findings}
            faults = map(from_fault, e.faults)
            self.findings += (each for each in faults if (each.topic, each.what) not in known)
        except (KvplugError, OSError) as e:
            self.findings.append(from_error(topic, e, change=topic))


@attrs.frozen(kw_only=True)
class Examination:
    """What the checks of one examination share. A check is a function of it that yields findings."""

    resolved: ResolvedConfig
    host: HostFacts = attrs.field(factory=HostFacts)
    facts: Facts = attrs.field(factory=dict)
    """Facts about this side's engine; missing ones are assumed to equal the peer's."""
    deadline: Deadline
    """Limits all waiting for others."""
    write: bool = False
    """Whether stores are tried with a page."""
    found: Diagnosis = attrs.field(factory=Diagnosis)
    """Gets the hosts and the measured rates."""

    @property
    def config(self) -> Config:
        return self.resolved.config
