"""Results by law: passed, failed, skipped, and waived with the reason. As terminal table, JSON, Markdown."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from kvplug_testing.laws import LAWS

FORMAT = 1
"""Version of the JSON format: changes when readers of it must change."""
NOT_RUN = "not run: "
"""How the reason begins of a test that failed because its suite was given up."""


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
    seconds: float = 0.0
    distribution: str = ""
    """The subject's distribution and version: ``"kvplug-cpu 0.1.0"``; empty if there is none."""


def _ids(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class Scorecard:
    """All results of one run."""

    level: str
    results: tuple[Result, ...]
    versions: Mapping[str, str] = attrs.field(factory=dict)
    platform: str = ""
    date: str = ""
    """When the run began, with its time zone (ISO 8601)."""
    above: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    """By subject and higher level, in their order: how many tests are deselected."""
    only: tuple[str, ...] = attrs.field(default=(), converter=_ids)
    """The laws that the run was asked to judge; empty if it was all of them."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects in the order of their first result."""
        return tuple(dict.fromkeys(result.subject for result in self.results))

    def suites(self, subject: str) -> tuple[str, ...]:
        """The suite classes of a subject, in the order of their first result."""
        return tuple(dict.fromkeys(result.suite for result in self.results if result.subject == subject))

    def counts(self, subject: str, suite: str = "") -> dict[str, Counter[Outcome]]:
        """For each tested law, in the order of the page: the number of tests with each outcome.

        ``suite`` is one of :meth:`suites`; without it, all of them count.
        """
        found: dict[str, Counter[Outcome]] = {id_: Counter() for id_ in LAWS}
        for result in self.of(subject, *Outcome, suite=suite):
            for id_ in result.laws:
                found[id_][result.outcome] += 1
        return {id_: counter for id_, counter in found.items() if counter}

    def of(self, subject: str, *outcomes: Outcome, suite: str = "") -> tuple[Result, ...]:
        """The results of a subject; only those of one of its :meth:`suites` if ``suite`` is given."""
        return tuple(
            result
            for result in self.results
            if result.subject == subject and result.outcome in outcomes and suite in ("", result.suite)
        )

    def seconds(self, subject: str, suite: str = "") -> float:
        """The total time of a subject's tests, or of those of one of its :meth:`suites`."""
        return round(sum(result.seconds for result in self.of(subject, *Outcome, suite=suite)), 3)

    # -- forms ---------------------------------------------------------------------------------

    def as_json(self) -> str:
        plain: dict[str, Any] = {
            "format": FORMAT,
            "level": self.level,
            "versions": dict(self.versions),
            "platform": self.platform,
            "date": self.date,
            "above": {subject: dict(counts) for subject, counts in self.above.items()},
            "only": list(self.only),
            "seconds": {subject: self.seconds(subject) for subject in self.subjects},
            "results": [attrs.asdict(result) for result in self.results],
        }
        return json.dumps(plain, indent=1) + "\n"

    def as_markdown(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        said = "; ".join(each for each in (versions, self.platform, self.date) if each)
        lines = [f"# Conformance, {self._scope}", "", said, ""]
        for subject in self.subjects:
            for suite, title in self._titles(subject):
                lines += [f"## {title}", ""]
                brought = {each.distribution for each in self.of(subject, *Outcome, suite=suite)} - {""}
                lines += ["; ".join([*sorted(brought), _taken(self.seconds(subject, suite))]), ""]
                lines += [f"| law | {' | '.join(Outcome)} |", "| --- |" + " --- |" * len(Outcome)]
                for id_, counter in self.counts(subject, suite).items():
                    numbers = " | ".join(str(counter[outcome] or "") for outcome in Outcome)
                    lines.append(f"| {LAWS[id_]} | {numbers} |")
                lines.append("")
                lines += [f"- {each}" for each in self._told(subject, suite)]
                lines.append("")
            if above := self._above(subject):
                lines += [above, ""]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write JSON if the file's name ends in ``.json``, otherwise Markdown."""
        text = self.as_json() if path.suffix == ".json" else self.as_markdown()
        path.write_text(text, encoding="utf-8")

    def print(self, file: Any) -> None:
        """A table for each subject, and below it why tests were skipped or waived."""
        from rich.console import Console
        from rich.table import Table

        console = Console(file=file, soft_wrap=True)
        for subject in self.subjects:
            for suite, title in self._titles(subject):
                took = _taken(self.seconds(subject, suite))
                table = Table(title=f"{title}, {self._scope}, {took}", title_justify="left")
                table.add_column("law", overflow="fold")
                for outcome in Outcome:
                    table.add_column(outcome.value, justify="right", no_wrap=True, min_width=len(outcome))
                for id_, counter in self.counts(subject, suite).items():
                    style = "red" if counter[Outcome.FAILED] else None
                    table.add_row(str(LAWS[id_]), *(str(counter[o] or "") for o in Outcome), style=style)
                console.print(table)
                for each in self._told(subject, suite):
                    console.print(f"  {each}", markup=False, highlight=False)
            if above := self._above(subject):
                console.print(f"  {above}", markup=False, highlight=False)

    @property
    def _scope(self) -> str:
        """What the run judged."""
        return f"level {self.level}" + (f", only {', '.join(self.only)}" if self.only else "")

    def _titles(self, subject: str) -> Iterable[tuple[str, str]]:
        """The subject's suites and the title of each table, which includes the class's name if there are
        several.
        """
        suites = self.suites(subject)
        return [(suite, subject if len(suites) == 1 else f"{subject} ({suite})") for suite in suites]

    def _above(self, subject: str) -> str:
        """A sentence about the deselected tests."""
        counts = self.above.get(subject, {})
        return ", ".join(f"{count} more with --kvplug-level {level}" for level, count in counts.items())

    def _told(self, subject: str, suite: str) -> Iterable[str]:
        """What is said below the table: each reason once, of waivers for each test."""
        by_reason: dict[tuple[str, ...], list[Result]] = {}
        for result in self.of(subject, Outcome.FAILED, Outcome.WAIVED, Outcome.SKIPPED, suite=suite):
            test = result.test.partition("[")[0] if result.outcome is Outcome.WAIVED else ""
            by_reason.setdefault((result.outcome, result.reason, test), []).append(result)
        for (outcome, reason, _), results in by_reason.items():
            if reason.startswith(NOT_RUN):
                yield f"{outcome}: {len(results)} more tests were {reason}"
                continue
            laws = ", ".join(dict.fromkeys(id_ for result in results for id_ in result.laws))
            tests = [*dict.fromkeys(result.test.partition("[")[0] for result in results)]
            others = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            yield f"{outcome}: {laws} {results[0].test}{others}: {reason}"


def _taken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def from_json(text: str) -> Scorecard:
    """Read the output of :meth:`Scorecard.as_json`, also of an earlier version with fewer fields.

    Raises:
        ValueError: the format is another one.
    """
    plain = json.loads(text)
    if plain.get("format") != FORMAT:
        raise ValueError(f"a scorecard of format {plain.get('format')!r}, and {FORMAT} is understood")
    results = tuple(result_from_plain(each) for each in plain.pop("results"))
    known = {field.name for field in attrs.fields(Scorecard)}
    return Scorecard(**{key: value for key, value in plain.items() if key in known}, results=results)


def result_from_plain(plain: Mapping[str, Any]) -> Result:
    """A :class:`Result` from its plain values. Other keys are ignored."""
    known = {field.name for field in attrs.fields(Result)}
    given = {key: value for key, value in plain.items() if key in known}
    return Result(**{**given, "laws": tuple(given["laws"]), "outcome": Outcome(given["outcome"])})
