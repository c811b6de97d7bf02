"""The results of the doctor's checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from kvplug.assembly.doctor.facts import Field
from kvplug.assembly.examination.finding import Finding, from_error, from_fault
from kvplug.assembly.examination.measuring import Measured
from kvplug.assembly.host import HostFacts
from kvplug.errors import ConfigError, KvplugError


@attrs.define(kw_only=True)
class Diagnosis:
    """Everything that the doctor found."""

    findings: list[Finding] = attrs.field(factory=list)
    fields: tuple[Field, ...] = ()
    """The fields of the handshake with the peer; empty without a peer."""
    measured: list[Measured] = attrs.field(factory=list)
    host: HostFacts | None = None
    peer_host: HostFacts | None = None

    @property
    def problems(self) -> int:
        return sum(finding.verdict == "problem" for finding in self.findings)

    def to_plain(self) -> dict[str, Any]:
        """Convert to plain values, for JSON."""
        return {"problems": self.problems, **attrs.asdict(self)}

    def collect(self, topic: str, of: Callable[[], Iterable[Finding]]) -> None:
        """Add findings. An error that interrupts them becomes a problem, unless it is already listed."""
        try:
            for each in of():
                self.findings.append(each)
        except ConfigError as e:
            known = {(each.topic, each.what) for each in self.findings}
            faults = map(from_fault, e.faults)
            self.findings += (each for each in faults if (each.topic, each.what) not in known)
        except (KvplugError, OSError) as e:
            self.findings.append(from_error(topic, e, change=topic))
