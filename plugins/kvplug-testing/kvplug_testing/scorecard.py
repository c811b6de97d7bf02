"""Results by law: passed, failed, skipped, and waived with the reason. As Markdown, also on the terminal, and
as JSON.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping

import attrs
import msgspec

from kvplug_testing.laws import LAWS


class Outcome(enum.StrEnum):
    """How one test ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    WAIVED = "waived"


@attrs.frozen(kw_only=True)
class Result:
    """One test of one suite."""

    subject: str
    """The tested implementation: ``"pipe cpu"``."""
    suite: str
    """Name of the class that ran."""
    test: str
    """Name of the test, with its parameters."""
    laws: tuple[str, ...]
    outcome: Outcome
    reason: str = ""
    """Why it was skipped or waived; for a failure, its first line."""


@attrs.frozen(kw_only=True)
class Scorecard:
    """All results of one run."""

    level: str
    results: tuple[Result, ...]
    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Of Python, torch, and the distributions of all installed plugins."""
    only: tuple[str, ...] = ()
    """The laws that the run was asked to judge; empty if it was all of them."""

    def as_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    def as_markdown(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        only = f", only {', '.join(self.only)}" if self.only else ""
        lines = [f"# Conformance, level {self.level}{only}", "", versions, ""]
        by_suite: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            by_suite.setdefault((result.subject, result.suite), []).append(result)
        for (subject, suite), results in by_suite.items():
            lines += [f"## {subject} ({suite})", "", *_table(results), "", *_reasons(results), ""]
        return "\n".join(lines)


def _table(results: list[Result]) -> Iterator[str]:
    """How many tests of each law ended in which way."""
    counts = {id_: Counter(each.outcome for each in results if id_ in each.laws) for id_ in LAWS}
    rows = [(str(LAWS[id_]), counter) for id_, counter in counts.items() if counter]
    width = max((len(title) for title, _ in rows), default=0)
    yield f"| {'law':{width}} | {' | '.join(Outcome)} |"
    yield f"| {'-' * width} | {' | '.join('-' * len(each) for each in Outcome)} |"
    for title, counter in rows:
        numbers = (f"{counter[each] or '':{len(each)}}" for each in Outcome)
        yield f"| {title:{width}} | {' | '.join(numbers)} |"


def _reasons(results: list[Result]) -> Iterator[str]:
    """Why tests were not passed: each reason once."""
    by_reason: dict[tuple[Outcome, str], list[Result]] = {}
    for outcome in (Outcome.FAILED, Outcome.WAIVED, Outcome.SKIPPED):
        for result in results:
            if result.outcome is outcome:
                by_reason.setdefault((outcome, result.reason), []).append(result)
    for (outcome, reason), alike in by_reason.items():
        laws = ", ".join(dict.fromkeys(id_ for result in alike for id_ in result.laws))
        others = len({result.test.partition("[")[0] for result in alike}) - 1
        more = f" and {others} more" if others else ""
        yield f"- {outcome}: {laws} {alike[0].test}{more}: {reason}"


def from_json(text: str) -> Scorecard:
    """Read the output of :meth:`Scorecard.as_json`."""
    return msgspec.json.decode(text, type=Scorecard)
