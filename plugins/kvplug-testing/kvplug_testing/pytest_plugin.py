"""The pytest plugin of the conformance kit: options, levels, waivers, and failures that name the law.

pytest loads it wherever kvplug-testing is installed. It imports only this file until an option is used or a
suite is collected; then it calls :mod:`kvplug_testing.reporting`.
"""

from __future__ import annotations

import pytest

_LEVELS = ("quick", "long")
_MARKER = "kvplug_law(id, ..., level, needs): a test of kvplug's conformance kit, and the laws that it judges"
_OPTIONS = {
    "transport": ("NAME", "judge the installed transport NAME (or KIND:NAME), without any test file"),
    "connector": ("NAME", "judge the installed connector NAME, without any test file"),
    "store": ("NAME", "judge the installed store NAME, without any test file"),
    "option": (
        "NAME.KEY=VALUE",
        "set the option KEY of the judged NAME, as the variable KVPLUG_OPTIONS__NAME__KEY does",
    ),
    "law": (
        "ID",
        "run only the tests of the law ID, such as PIPE-4, or of all laws of a kind, such as PIPE",
    ),
    "report": ("FILE", "write the scorecard to FILE: as JSON if its name ends in .json, else as Markdown"),
}
"""Options that may be given several times: what each takes, and its help."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvplug", "kvplug's conformance kit")
    for name, (metavar, text) in _OPTIONS.items():
        group.addoption(f"--kvplug-{name}", metavar=metavar, action="append", default=[], help=text)
    group.addoption(
        "--kvplug-level",
        choices=_LEVELS,
        default="quick",
        help="quick: while you write (default); long: minutes, before a release",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    if any(config.getoption(f"kvplug_{name}") for name in _OPTIONS):
        from kvplug_testing import reporting

        reporting.reporter_of(config)


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Collect no test above the level: with all of their parameters these are most of a suite."""
    marks = (mark for mark in getattr(obj, "pytestmark", ()) if mark.name == "kvplug_law")
    asked = _LEVELS.index(collector.config.option.kvplug_level)
    return [] if any(_LEVELS.index(mark.kwargs["level"]) > asked for mark in marks) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put simple laws first, waive tests, and select by law."""
    if config.option.kvplug_law or any(item.get_closest_marker("kvplug_law") for item in items):
        from kvplug_testing import reporting

        reporting.reporter_of(config).select(config, items)
