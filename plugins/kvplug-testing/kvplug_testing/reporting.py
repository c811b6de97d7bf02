"""The part of the pytest plugin that runs if a suite is collected: waivers, laws, scorecard."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Generator, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvplug import KvplugError
from kvplug.kit import did_you_mean
from kvplug_testing import waits
from kvplug_testing.contract import suites
from kvplug_testing.contract.base import Contract
from kvplug_testing.hangs import Hangs
from kvplug_testing.laws import LAWS, PROGRAM, selected
from kvplug_testing.scorecard import NOT_RUN, Outcome, Result, Scorecard, result_from_plain
from kvplug_testing.selection import put_in_order, selected_tests, suite_of

_NAME = "kvplug_judge"
_PROPERTY = "kvplug"
_WAIVED = "waived: "
_KEPT = pytest.StashKey[str]()
"""The waiver of a waived test whose call has passed. A leak that it leaves may still break the law."""
_NOTHING_JUDGED = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
"""Exit codes of a run that does not overwrite an earlier report."""
_JUDGED = Path(__file__).with_name("contract") / "collected_suites.py"


def reporter_of(config: pytest.Config) -> Reporter:
    """The reporter of this run, created on first use."""
    found = config.pluginmanager.get_plugin(_NAME)
    if found is None:
        found = Reporter(config)
        config.pluginmanager.register(found, _NAME)
    return found


class Reporter:
    """The pytest plugin that collects the results."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._level: str = config.option.kvplug_level
        try:
            self._laws = selected(config.option.kvplug_law)
        except LookupError as e:
            raise pytest.UsageError(f"--kvplug-law: {e}") from e
        self._hangs = Hangs()
        self._results: list[Result] = []
        self._distributions: dict[type[Contract], str] = {}
        """The distribution of each suite's subject."""
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._is_worker = hasattr(config, "workerinput")
        """Whether this is a worker of pytest-xdist: the controller counts its results."""
        self._reports = [Path(name).absolute() for name in config.option.kvplug_report]
        for path in self._reports:
            if path.suffix not in (".json", ".md"):
                raise pytest.UsageError(f"--kvplug-report {path}: the name of a report ends in .json or .md")
            if not path.parent.is_dir():
                raise pytest.UsageError(f"--kvplug-report {path}: there is no folder {path.parent}")

    def choose(
        self,
        transports: Iterable[str],
        connectors: Iterable[str],
        options: Iterable[str] = (),
        *,
        stores: Iterable[str] = (),
    ) -> None:
        """Add suites for these names to the test files of the command line.

        Raises:
            pytest.UsageError: a name is not installed, or the options are wrong.
        """
        try:
            chosen = suites.installed(transports, connectors, options, stores=stores)
        except KvplugError as e:
            raise pytest.UsageError(str(e)) from e
        if chosen:
            suites.chosen[:] = chosen
            by_hand = self._config.args_source is pytest.Config.ArgsSource.ARGS
            self._config.args = [*(self._config.args if by_hand else ()), str(_JUDGED)]

    # -- before ----------------------------------------------------------------------------------

    def prepare(self, items: list[pytest.Item]) -> None:
        """Put the tests in order, and mark the waived ones.

        Raises:
            pytest.UsageError: a test with a law is in no suite, or a waiver has no reason or names no test.
        """
        judged = [item for item in items if item.get_closest_marker("kvplug_law") is not None]
        for suite in dict.fromkeys(suite_of(item) for item in judged):
            _check_waivers(suite)
        for item in judged:
            waivers = suite_of(item).waivers
            if reason := waivers.get(item.name, waivers.get(item.name.partition("[")[0])):
                # Not strict: pytest would decide before the check for leaks has run.
                item.add_marker(pytest.mark.xfail(reason=f"{_WAIVED}{reason}", strict=False))
        put_in_order(items)

    def select(self, items: list[pytest.Item]) -> None:
        """Deselect tests above the level and of other laws.

        Raises:
            pytest.UsageError: no test judges the laws that are asked for.
        """
        kept, left_out = selected_tests(items, self._level, self._laws)
        for suite in {suite_of(item) for item in kept if item.get_closest_marker("kvplug_law") is not None}:
            # Before any test, so that modules and resources that this loads are not counted as a test's leak.
            with contextlib.suppress(KvplugError):  # the tests report the error
                self._distributions[suite] = suite.distribution()
        if left_out:
            self._config.hook.pytest_deselected(items=left_out)
            items[:] = kept

    # -- during ----------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("kvplug_law") is None:
            return
        if reason := self._hangs.reason(suite_of(item)):
            pytest.fail(reason, pytrace=False)  # its law is not judged: that is no success

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        marker = item.get_closest_marker("kvplug_law")
        if marker is None:
            return report
        suite = suite_of(item)
        waived = getattr(report, "wasxfail", "")
        if report.when == "call" and report.passed and waived.startswith(_WAIVED):
            item.stash[_KEPT] = waived.removeprefix(_WAIVED)
        elif report.when == "teardown" and report.passed and _KEPT in item.stash:
            report.outcome = "failed"
            report.longrepr = f"it is kept, so the waiver ({item.stash[_KEPT]}) must go"
        result = _result(report, suite, item.name, marker.args)
        if result is not None:
            result["distribution"] = self._distributions.get(suite, "")
            report.user_properties.append((_PROPERTY, result))
        if report.failed and call.excinfo is not None:
            self._hangs.note(suite, item.name, call.excinfo.value, call.duration)
        if report.failed and not _observed(report).startswith(NOT_RUN):
            _quote(report, marker.args)
            if busy := waits.busy_host():
                hint = "if something came too late, repeat the test while the host is idle"
                report.sections.append(("busy host", f"{busy}; {hint}"))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._is_worker:
            return
        given: list[tuple[str, Any]] = report.user_properties
        self._results += [result_from_plain(plain) for name, plain in given if name == _PROPERTY]
        report.user_properties = [each for each in given if each[0] != _PROPERTY]

    # -- after -----------------------------------------------------------------------------------

    @property
    def scorecard(self) -> Scorecard:
        """The results so far. A test that failed twice (in its call and in the check for leaks) is one."""
        final: dict[tuple[str, str, str], Result] = {}
        for result in self._results:
            key = (result.subject, result.suite, result.test)
            before = final.setdefault(key, result)
            if before is not result and result.outcome is Outcome.FAILED:
                reasons = [each.reason for each in (before, result) if each.outcome is Outcome.FAILED]
                final[key] = attrs.evolve(before, outcome=Outcome.FAILED, reason="; then ".join(reasons))
        return Scorecard(
            level=self._level,
            results=tuple(final.values()),
            versions=suites.versions(),
            platform=platform.platform(),
            date=self._date,
            only=self._laws,
        )

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if not self._is_worker and exitstatus not in _NOTHING_JUDGED:
            for path in self._reports:
                self.scorecard.write(path)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        card = self.scorecard
        if card.results:
            terminalreporter.section("kvplug conformance")
            terminalreporter.write(card.as_markdown())
            if any(result.outcome is Outcome.FAILED for result in card.results):
                terminalreporter.write_line(f"`{PROGRAM} ID` prints the law with this id")
        for path in self._reports if exitstatus not in _NOTHING_JUDGED else ():
            terminalreporter.write_line(f"scorecard written to {path}")


def _check_waivers(suite: type[Contract]) -> None:
    tests = [name for name in dir(suite) if name.startswith("test")]
    for name, reason in suite.waivers.items():
        function = name.partition("[")[0]
        if function not in tests:
            hint = did_you_mean(function, tests)
            raise pytest.UsageError(f"{suite.__name__}.waivers: there is no test {function}{hint}")
        if not reason.strip():
            raise pytest.UsageError(f"{suite.__name__}.waivers: {name} needs a reason in words")


def _result(
    report: pytest.TestReport, suite: type[Contract], test: str, laws: tuple[str, ...]
) -> dict[str, Any] | None:
    """The fields of a :class:`Result`; ``None`` if this phase of the test decides nothing."""
    waived = getattr(report, "wasxfail", "")
    if report.skipped and waived.startswith(_WAIVED):
        outcome, reason = Outcome.WAIVED, waived.removeprefix(_WAIVED)
    elif report.skipped:
        skip = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        outcome, reason = Outcome.SKIPPED, skip.removeprefix("Skipped: ")
    elif report.failed:
        outcome, reason = Outcome.FAILED, _observed(report)
    elif report.when == "call" and not waived:
        outcome, reason = Outcome.PASSED, ""
    else:
        return None
    return {
        "subject": suite.subject(),
        "suite": suite.__name__,
        "test": test,
        "laws": laws,
        "outcome": outcome.value,
        "reason": reason,
        "seconds": round(report.duration, 3),
    }


def _observed(report: pytest.TestReport) -> str:
    """The first line of the failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next((line for line in text.splitlines() if line.strip()), "").removeprefix("Failed: ")


def _quote(report: pytest.TestReport, laws: tuple[str, ...]) -> None:
    """Put the law's title before the failure, and its text after it."""
    said = " and ".join(str(LAWS[id_]) for id_ in laws)
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"law {said}: {crash.message}"
    elif isinstance(report.longrepr, str):
        report.longrepr = f"law {said}: {report.longrepr}"
    report.sections.append(("kvplug conformance", "\n".join(LAWS[id_].quoted for id_ in laws)))
