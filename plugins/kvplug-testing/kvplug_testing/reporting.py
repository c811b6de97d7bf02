"""The part of the pytest plugin that runs if a suite is collected: levels, waivers, laws, scorecard."""

from __future__ import annotations

import contextlib
import platform
from collections import Counter
from collections.abc import Generator, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvplug.errors import ConfigError, KvplugError
from kvplug_testing.collected import Collected
from kvplug_testing.contract import suites
from kvplug_testing.contract.base import LEVELS, Contract
from kvplug_testing.laws import LAWS
from kvplug_testing.scorecard import Outcome, Result, Scorecard, result_from_plain
from kvplug_testing.waivers import Waivers, waivers_for

_NAME = "kvplug_judge"
_PROPERTY = "kvplug"
_WAIVED = "waived: "
_KEPT = pytest.StashKey[str]()
"""The waiver of a waived test whose call has passed. A leak that it leaves may still break the law."""
_ABOVE = "kvplug_above"
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
        self._results: list[Result] = []
        self._above: dict[str, Counter[str]] = {}
        """By subject and level: how many tests are deselected because their level is higher."""
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

    def waive(self, items: list[pytest.Item]) -> None:
        """Mark the waived tests.

        Raises:
            pytest.UsageError: a test with a law is in no suite, waivers cannot be read, or a waiver names no
            test.
        """
        known: dict[Path, Waivers] = {}
        judged = [item for item in items if item.get_closest_marker("kvplug_law") is not None]
        for item in judged:
            suite = _suite_of(item)
            reason = self._waivers(item, known).reason(suite.__name__, item.name)
            if reason:
                # Not strict: pytest would decide before the check for leaks has run.
                item.add_marker(pytest.mark.xfail(reason=f"{_WAIVED}{reason}", strict=False))
        collected = Collected(self._config, judged)
        for waivers in {each.path: each for each in known.values() if each.reasons}.values():
            try:
                faults = collected.faults(waivers)
            except KvplugError as e:
                raise pytest.UsageError(f"{waivers.path}: {e}") from e
            if faults:
                raise pytest.UsageError(
                    f"{waivers.path}: tool.kvplug.waivers names no test of the kit: {', '.join(faults)}"
                )

    def select(self, items: list[pytest.Item]) -> None:
        """Deselect tests above the level, and count them."""
        kept, left_out = [], []
        for item in items:
            marker = item.get_closest_marker("kvplug_law")
            level = LEVELS[0] if marker is None else marker.kwargs["level"]
            if LEVELS.index(level) <= LEVELS.index(self._level):
                kept.append(item)
                continue
            left_out.append(item)
            self._above.setdefault(_suite_of(item).subject(), Counter())[level] += 1
        for suite in {_suite_of(item) for item in kept if item.get_closest_marker("kvplug_law") is not None}:
            # Before any test, so that modules and resources that this loads are not counted as a test's leak.
            with contextlib.suppress(KvplugError):  # the tests report the error
                self._distributions[suite] = suite.distribution()
        if left_out:
            self._config.hook.pytest_deselected(items=left_out)
            items[:] = kept

    def _waivers(self, item: pytest.Item, known: dict[Path, Waivers]) -> Waivers:
        folder = item.config.invocation_params.dir if item.path == _JUDGED else item.path.parent
        if folder not in known:
            try:
                known[folder] = waivers_for(folder)
            except ConfigError as e:
                raise pytest.UsageError(str(e)) from e
        return known[folder]

    # -- during ----------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        marker = item.get_closest_marker("kvplug_law")
        if marker is None:
            return report
        suite = _suite_of(item)
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
        if report.failed:
            _quote(report, marker.args)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._is_worker:
            return
        told: list[tuple[str, Any]] = report.user_properties
        self._results += [result_from_plain(plain) for name, plain in told if name == _PROPERTY]
        report.user_properties = [each for each in report.user_properties if each[0] != _PROPERTY]

    # -- after -----------------------------------------------------------------------------------

    @property
    def scorecard(self) -> Scorecard:
        """The results so far. A test that failed twice (in its call and in the check for leaks) is one
        result.
        """
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
            above={
                subject: {level: counter[level] for level in LEVELS if counter[level]}
                for subject, counter in self._above.items()
            },
        )

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._is_worker:
            output: dict[str, Any] = self._config.workeroutput  # type: ignore[attr-defined]
            output[_ABOVE] = {subject: dict(counter) for subject, counter in self._above.items()}
            return
        for path in self._reports if exitstatus not in _NOTHING_JUDGED else ():
            self.scorecard.write(path)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A hook of pytest-xdist. Every worker collects all tests, so the counts of one worker are enough."""
        told = getattr(node, "workeroutput", None) or {}
        self._above.update((subject, Counter(counts)) for subject, counts in told.get(_ABOVE, {}).items())

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        card = self.scorecard
        if card.results:
            terminalreporter.section("kvplug conformance")
            card.print(terminalreporter._tw._file)
        for path in self._reports if exitstatus not in _NOTHING_JUDGED else ():
            terminalreporter.write_line(f"scorecard written to {path}")


def _suite_of(item: pytest.Item) -> type[Contract]:
    """The suite of a test with a law."""
    suite = getattr(item, "cls", None)
    if not (isinstance(suite, type) and issubclass(suite, Contract)):
        raise pytest.UsageError(
            f"{item.nodeid} names a law and stands in no suite: put it into a class made from one, such as"
            " kvplug_testing.PipeContract, or from kvplug_testing.contract.base.Contract"
        )
    return suite


def _result(
    report: pytest.TestReport, suite: type[Contract], test: str, laws: tuple[str, ...]
) -> dict[str, Any] | None:
    """The fields of a :class:`Result`; ``None`` if this phase of the test decides nothing."""
    waived = getattr(report, "wasxfail", "")
    if report.skipped and waived.startswith(_WAIVED):
        outcome, reason = Outcome.WAIVED, waived.removeprefix(_WAIVED)
    elif report.skipped:
        outcome, reason = Outcome.SKIPPED, _skip_reason(report)
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


def _skip_reason(report: pytest.TestReport) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def _observed(report: pytest.TestReport) -> str:
    """The first line of the failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next((line for line in text.splitlines() if line.strip()), "")


def _quote(report: pytest.TestReport, laws: tuple[str, ...]) -> None:
    """Put the law's title before the failure, and its text after it."""
    said = " and ".join(str(LAWS[id_]) for id_ in laws)
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"law {said}: {crash.message}"
    elif isinstance(report.longrepr, str):
        report.longrepr = f"law {said}: {report.longrepr}"
    report.sections.append(("kvplug conformance", "\n".join(LAWS[id_].quoted for id_ in laws)))
