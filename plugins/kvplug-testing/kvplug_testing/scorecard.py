"""Results by law: passed, failed, skipped, and waived with the reason. As Markdown, also on the terminal, and
as JSON.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterator, Mapping
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


@attrs.frozen(kw_only=True)
class Scorecard:
    """All results of one run."""

    level: str
    results: tuple[Result, ...]
    versions: Mapping[str, str] = attrs.field(factory=dict)
    platform: str = ""
    date: str = ""
    """When the run began, with its time zone (ISO 8601)."""
    only: tuple[str, ...] = ()
    """The laws that the run was asked to judge; empty if it was all of them."""

    def as_json(self) -> str:
        plain = {**attrs.asdict(self, recurse=False), "format": FORMAT}
        plain["results"] = [attrs.asdict(result) for result in self.results]
        return json.dumps(plain, indent=1) + "\n"

    def as_markdown(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        only = f", only {', '.join(self.only)}" if self.only else ""
        facts = "; ".join(each for each in (versions, self.platform, self.date) if each)
        return "\n".join([f"# Conformance, level {self.level}{only}", "", facts, "", *self._tables()])

    def _tables(self) -> Iterator[str]:
        """Of each subject a table, and below it why tests were not passed. If several classes have judged a
        subject, each has a table.
        """
        by_suite: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            by_suite.setdefault((result.subject, result.suite), []).append(result)
        for (subject, suite), results in by_suite.items():
            is_alone = sum(other == subject for other, _ in by_suite) == 1
            yield from (f"## {subject}" if is_alone else f"## {subject} ({suite})", "")
            seconds = f"{sum(result.seconds for result in results):.1f} s"
            yield from ("; ".join([*sorted({each.distribution for each in results} - {""}), seconds]), "")
            counts = {id_: Counter(each.outcome for each in results if id_ in each.laws) for id_ in LAWS}
            rows = [(str(LAWS[id_]), counter) for id_, counter in counts.items() if counter]
            width = max((len(title) for title, _ in rows), default=0)
            yield f"| {'law':{width}} | {' | '.join(Outcome)} |"
            yield f"| {'-' * width} | {' | '.join('-' * len(each) for each in Outcome)} |"
            for title, counter in rows:
                numbers = (f"{counter[each] or '':{len(each)}}" for each in Outcome)
                yield f"| {title:{width}} | {' | '.join(numbers)} |"
            yield from ("", *(f"- {line}" for line in _reasons(results)), "")

    def write(self, path: Path) -> None:
        """Write JSON if the file's name ends in ``.json``, otherwise Markdown."""
        text = self.as_json() if path.suffix == ".json" else self.as_markdown()
        path.write_text(text, encoding="utf-8")


def _reasons(results: list[Result]) -> Iterator[str]:
    """Each reason once, of waivers for each test."""
    by_reason: dict[tuple[str, ...], list[Result]] = {}
    for outcome in (Outcome.FAILED, Outcome.WAIVED, Outcome.SKIPPED):
        for result in results:
            if result.outcome is outcome:
                test = result.test.partition("[")[0] if outcome is Outcome.WAIVED else ""
                by_reason.setdefault((outcome, result.reason, test), []).append(result)
    for (ended, reason, _), alike in by_reason.items():
        if reason.startswith(NOT_RUN):
            yield f"{ended}: {len(alike)} more tests were {reason}"
            continue
        laws = ", ".join(dict.fromkeys(id_ for result in alike for id_ in result.laws))
        others = len({result.test.partition("[")[0] for result in alike}) - 1
        more = f" and {others} more" if others else ""
        yield f"{ended}: {laws} {alike[0].test}{more}: {reason}"


def from_json(text: str) -> Scorecard:
    """Read the output of :meth:`Scorecard.as_json`, also of another version with fewer or more fields.

    Raises:
        ValueError: the format is another one.
    """
    plain = json.loads(text)
    if plain.get("format") != FORMAT:
        raise ValueError(f"a scorecard of format {plain.get('format')!r}, and {FORMAT} is understood")
    results = tuple(result_from_plain(each) for each in plain.pop("results"))
    given = _known(Scorecard, plain)
    return Scorecard(**{**given, "results": results, "only": tuple(given.get("only", ()))})


def result_from_plain(plain: Mapping[str, Any]) -> Result:
    """A :class:`Result` from its plain values. Other keys are ignored."""
    given = _known(Result, plain)
    return Result(**{**given, "laws": tuple(given["laws"]), "outcome": Outcome(given["outcome"])})


def _known(cls: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in attrs.fields(cls)}
    return {key: value for key, value in plain.items() if key in known}
