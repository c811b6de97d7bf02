"""What ran, by law: passed, failed, skipped and waived with the reason. A terminal table, JSON, Markdown."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from kvplug.testing.laws import LAWS

FORMAT = 1
"""Of the JSON: changes when a reader of it would have to."""


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
    """What was judged: ``"pipe cpu"``."""
    suite: str
    """Name of the class that ran."""
    test: str
    """Name of the test, with its parameters."""
    laws: tuple[str, ...]
    outcome: Outcome
    reason: str = ""
    """Why it was skipped or waived; of a failure, what was observed, in one line."""
    seconds: float = 0.0


@attrs.frozen(kw_only=True)
class Scorecard:
    """Everything that one run has judged."""

    level: str
    results: tuple[Result, ...]
    versions: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def subjects(self) -> tuple[str, ...]:
        """In the order in which they came."""
        return tuple(dict.fromkeys(result.subject for result in self.results))

    def counts(self, subject: str) -> dict[str, Counter[Outcome]]:
        """For each law that was judged, in the order of the page: how many tests ended how."""
        found: dict[str, Counter[Outcome]] = {id_: Counter() for id_ in LAWS}
        for result in self.results:
            if result.subject == subject:
                for id_ in result.laws:
                    found[id_][result.outcome] += 1
        return {id_: counter for id_, counter in found.items() if counter}

    def of(self, subject: str, *outcomes: Outcome) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.subject == subject and r.outcome in outcomes)

    # -- forms ---------------------------------------------------------------------------------

    def as_json(self) -> str:
        plain: dict[str, Any] = {
            "format": FORMAT,
            "level": self.level,
            "versions": dict(self.versions),
            "results": [attrs.asdict(result) for result in self.results],
        }
        return json.dumps(plain, indent=1) + "\n"

    def as_markdown(self) -> str:
        lines = [f"# Conformance, level {self.level}", ""]
        lines += [f"{', '.join(f'{name} {version}' for name, version in self.versions.items())}", ""]
        for subject in self.subjects:
            lines += [
                f"## {subject}",
                "",
                f"| law | {' | '.join(Outcome)} |",
                "| --- |" + " --- |" * len(Outcome),
            ]
            for id_, counter in self.counts(subject).items():
                numbers = " | ".join(str(counter[outcome] or "") for outcome in Outcome)
                lines.append(f"| {LAWS[id_]} | {numbers} |")
            lines.append("")
            lines += [f"- {_sentence(result)}" for result in self._told(subject)]
            lines.append("")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """As the file's name ends: ``.json`` or ``.md``."""
        text = self.as_json() if path.suffix == ".json" else self.as_markdown()
        path.write_text(text, encoding="utf-8")

    def print(self, file: Any) -> None:
        """A table for each subject, and below it why tests were skipped or waived."""
        from rich.console import Console
        from rich.table import Table

        console = Console(file=file, soft_wrap=True)
        for subject in self.subjects:
            table = Table(title=f"{subject}, level {self.level}", title_justify="left")
            table.add_column("law", no_wrap=True)
            for outcome in Outcome:
                table.add_column(outcome.value, justify="right")
            for id_, counter in self.counts(subject).items():
                style = "red" if counter[Outcome.FAILED] else None
                table.add_row(str(LAWS[id_]), *(str(counter[o] or "") for o in Outcome), style=style)
            console.print(table)
            for result in self._told(subject):
                console.print(f"  {_sentence(result)}", markup=False, highlight=False)

    def _told(self, subject: str) -> Iterable[Result]:
        """What is said in words: each reason once."""
        seen = set()
        for result in self.of(subject, Outcome.FAILED, Outcome.WAIVED, Outcome.SKIPPED):
            key = (result.outcome, result.reason, result.test.partition("[")[0])
            if key not in seen:
                seen.add(key)
                yield result


def _sentence(result: Result) -> str:
    return f"{result.outcome}: {', '.join(result.laws)} {result.test}: {result.reason}"


def from_json(text: str) -> Scorecard:
    """Read what :meth:`Scorecard.as_json` wrote.

    Raises:
        ValueError: it is of another format.
    """
    plain = json.loads(text)
    if plain.get("format") != FORMAT:
        raise ValueError(f"a scorecard of format {plain.get('format')!r}, and {FORMAT} is understood")
    results = tuple(result_from_plain(each) for each in plain["results"])
    return Scorecard(level=plain["level"], results=results, versions=plain["versions"])


def result_from_plain(plain: Mapping[str, Any]) -> Result:
    """A :class:`Result` from its plain values."""
    return Result(**{**plain, "laws": tuple(plain["laws"]), "outcome": Outcome(plain["outcome"])})
