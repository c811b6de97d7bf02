"""The part of the pytest plugin that runs if a suite is collected: which tests run, in which order, and what
became of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplug import KvplugError
from kvplug_testing.contract import suites
from kvplug_testing.contract.base import Contract
from kvplug_testing.laws import LAWS, selected
from kvplug_testing.scorecard import Outcome, Result, Scorecard

_NAME = "kvplug_judge"
_PROPERTY = "kvplug"
_NOTHING_JUDGED = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
"""Exit codes of a run that does not overwrite an earlier report."""


class _Folder(pytest.File):
    """A folder above :data:`.suites.COLLECTED`. pytest loads the ``conftest.py`` of its own folders, here
    that of any project that the environment happens to lie in."""

    def collect(self) -> Iterator[pytest.Collector]:
        below = next(
            path for path in (suites.COLLECTED, *suites.COLLECTED.parents) if path.parent == self.path
        )
        kind = pytest.Module if below == suites.COLLECTED else _Folder
        yield kind.from_parent(self, path=below)


def reporter_of(config: pytest.Config) -> Reporter:
    """The reporter of this run, created on first use."""
    found = config.pluginmanager.get_plugin(_NAME)
    if found is None:
        found = Reporter(config)
        config.pluginmanager.register(found, _NAME)
    return found


class Reporter:
    """The pytest plugin that selects tests of suites, and collects their results."""

    def __init__(self, config: pytest.Config) -> None:
        """Raises:
        pytest.UsageError: an option of the command line is wrong.
        """
        option = config.option
        self._level: str = option.kvplug_level
        self._is_alone = False
        """Whether pytest collects nothing but the suites of the named subjects."""
        self._results: dict[tuple[str, str, str], Result] = {}
        self._is_worker = hasattr(config, "workerinput")
        """Whether this is a worker of pytest-xdist: the controller counts its results."""
        self._reports = [Path(name).absolute() for name in option.kvplug_report]
        try:
            self._laws = selected(option.kvplug_law)
            chosen = suites.installed(
                option.kvplug_transport,
                option.kvplug_connector,
                option.kvplug_option,
                stores=option.kvplug_store,
            )
        except (LookupError, KvplugError) as e:
            raise pytest.UsageError(str(e)) from e
        if chosen:
            suites.chosen[:] = chosen
            by_hand = config.args_source is pytest.Config.ArgsSource.ARGS
            config.args = [*(config.args if by_hand else ()), str(suites.COLLECTED)]
            self._is_alone = not by_hand

    # -- before ----------------------------------------------------------------------------------

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        rootdir = parent.config.rootpath
        is_above = path in suites.COLLECTED.parents and path not in (rootdir, *rootdir.parents)
        return _Folder.from_parent(parent, path=path) if is_above and self._is_alone else None

    def select(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Put the tests in order, mark the waived ones, and deselect those of other laws.

        Raises:
            pytest.UsageError: no test judges the laws that are asked for, or one with a law is in no suite.
        """
        _put_in_order(items)
        kept = list(filter(self._runs, items))
        if self._laws and not kept:
            laws = ", ".join(self._laws)
            raise pytest.UsageError(f"--kvplug-law: no test here judges {laws} at level {self._level}")
        for item in filter(_laws_of, kept):
            suite = _suite_of(item)
            if reason := suite.waivers.get(item.name, suite.waivers.get(item.name.partition("[")[0])):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
            judged = (suite.subject(), suite.__name__, item.name, _laws_of(item))
            item.user_properties.append((_PROPERTY, judged))
        config.hook.pytest_deselected(items=[item for item in items if not self._runs(item)])
        items[:] = kept

    def _runs(self, item: pytest.Item) -> bool:
        return not self._laws or bool({*self._laws} & {*_laws_of(item)})

    # -- during ----------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        judged: Any = dict(report.user_properties).get(_PROPERTY)
        if judged is None or (ended := _outcome(report)) is None:
            return
        subject, suite, test, laws = judged
        titles = f"law {' and '.join(str(LAWS[id_]) for id_ in laws)}: "
        # A test that has failed twice (in its call and in the check for leaks) is one, with its first reason.
        before = self._results.get((subject, suite, test))
        if before is None or before.outcome is not Outcome.FAILED:
            self._results[subject, suite, test] = Result(
                subject=subject,
                suite=suite,
                test=test,
                laws=tuple(laws),
                outcome=ended[0],
                reason=ended[1].removeprefix(titles).removeprefix("Failed: "),
            )
        if report.failed and not hasattr(report, "node"):  # else a worker of pytest-xdist has quoted them
            _quote(report, titles, "\n".join(LAWS[id_].quoted for id_ in laws))

    # -- after -----------------------------------------------------------------------------------

    @property
    def scorecard(self) -> Scorecard:
        """The results so far."""
        results = tuple(self._results.values())
        return Scorecard(level=self._level, results=results, versions=suites.versions(), only=self._laws)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if not self._is_worker and exitstatus not in _NOTHING_JUDGED:
            for path in self._reports:
                card = self.scorecard
                text = card.as_json() if path.suffix == ".json" else card.as_markdown()
                path.write_text(text, encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        card = self.scorecard
        if card.results:
            terminalreporter.section("kvplug conformance")
            terminalreporter.write(card.as_markdown())


def _laws_of(item: pytest.Item) -> tuple[str, ...]:
    """The laws that a test judges."""
    marker = item.get_closest_marker("kvplug_law")
    return () if marker is None else marker.args


def _suite_of(item: Any) -> type[Contract]:
    """The suite of a test with a law.

    Raises:
        pytest.UsageError: it is in none.
    """
    suite: type[Contract] | None = item.cls
    if suite is None or not issubclass(suite, Contract):
        raise pytest.UsageError(f"{item.nodeid} names a law and stands in no class that is made from a suite")
    return suite


def _put_in_order(items: list[pytest.Item]) -> None:
    """Sort the tests of each suite, in place: simple laws come first.

    A suite is a class made of parts, and its bases name them in this order: what arrives, in what order, how
    things end, what is left behind. If a transport corrupts messages, the first failure then shows that, and
    not that an object of a later test was left behind. pytest itself collects the last base first. Tests
    that an author has added come last.
    """
    first: dict[Any, int] = {}

    def place(numbered: tuple[int, Any]) -> tuple[int, int]:
        at, item = numbered
        if not _laws_of(item):
            return at, 0
        bases = _suite_of(item).__mro__
        part = max(index for index, base in enumerate(bases) if item.originalname in vars(base))
        return first.setdefault(item.cls, at), part or len(bases)

    items[:] = [item for _, item in sorted(enumerate(items), key=place)]


def _outcome(report: pytest.TestReport) -> tuple[Outcome, str] | None:
    """How a test ended and why; ``None`` if this phase of it decides nothing."""
    if report.skipped:
        if waived := getattr(report, "wasxfail", ""):
            return Outcome.WAIVED, waived
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return Outcome.SKIPPED, reason.removeprefix("Skipped: ")
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
        line = next((line for line in text.splitlines() if line.strip()), "")
        return Outcome.FAILED, line
    return (Outcome.PASSED, "") if report.when == "call" else None


def _quote(report: pytest.TestReport, titles: str, quoted: str) -> None:
    """Put the titles of laws before the failure, and their text after it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = titles + crash.message
    elif isinstance(report.longrepr, str):
        report.longrepr = titles + report.longrepr
    report.sections.append(("kvplug conformance", quoted))
