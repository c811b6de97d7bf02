"""The state that the checks of one examination share, and their findings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from kvplug.assembly.doctor.facts import Facts
from kvplug.assembly.doctor.finding import Finding, faulty_keys, from_error, from_fault, not_checked
from kvplug.assembly.examination import Measured
from kvplug.assembly.host import HostFacts
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.config.config import Config
from kvplug.errors import ConfigError, KvplugError, PluginError
from kvplug.net.deadline import Deadline


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
        """Add findings. An error that interrupts them becomes a problem. If that problem is already listed, a
        note reports that the check was not completed."""
        try:
            for each in findings:
                self.findings.append(each)
        except ConfigError as e:
            known = {(each.topic, each.what) for each in self.findings}
            faults = [each for each in map(from_fault, e.faults) if (each.topic, each.what) not in known]
            self.findings += faults or [
                not_checked(topic, f"this check of {topic} was not completed", faulty_keys(e))
            ]
        except (KvplugError, OSError) as e:
            self.findings.append(from_error(topic, e, change=topic))


@attrs.frozen(kw_only=True)
class Examination:
    """The state that the checks of one examination share. Each check takes it and yields findings."""

    resolved: ResolvedConfig
    host: HostFacts = attrs.field(factory=HostFacts)
    facts: Facts = attrs.field(factory=dict)
    """Facts about this side's engine; missing ones are assumed to equal the peer's."""
    deadline: Deadline
    """Limits the total wait for stores, directories and peers."""
    write: bool = False
    """Whether to put a test page into each store."""
    found: Diagnosis = attrs.field(factory=Diagnosis)
    """The findings so far. Checks set its ``peer_host`` and add measured rates to it."""

    @property
    def config(self) -> Config:
        return self.resolved.config

    def faulty_for_credentials(self) -> tuple[str, ...]:
        """Return the topics of the problems that leave this end without credentials, if there are any."""
        try:
            _ = self.resolved.credentials
        except ConfigError:
            problems = {each.topic for each in self.found.findings if each.verdict == "problem"}
            return tuple(each for each in ("tls", "secret") if each in problems) or ("secret",)
        return ()

    def faulty_for_links(self) -> tuple[str, ...]:
        """Return the topics of the problems that keep this end from connecting to engines, if any."""
        try:
            _ = self.resolved.pipes
        except PluginError:
            return (*self.faulty_for_credentials(), "transport")
        return self.faulty_for_credentials()
