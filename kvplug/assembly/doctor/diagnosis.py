"""What the checks of one examination share, and everything that they found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from kvplug.assembly.doctor.facts import Facts
from kvplug.assembly.doctor.finding import Finding, from_error, from_fault
from kvplug.assembly.examination import Measured
from kvplug.assembly.host import HostFacts
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.config.config import Config
from kvplug.errors import ConfigError, KvplugError
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
