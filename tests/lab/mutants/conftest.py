"""Each mutant runs the tests of the laws that it breaks, until one of them has caught it.

Tests that have caught the mutant before, by ``matrix.jsonl``, run first, since the others may be slow. With
``--every-test-to LEVEL``, a caught mutant runs the others up to that level, too.

A control (``is_control``) has no fault. It runs last, in the same process and with the same ``patience_s``.
It runs the tests that have caught a similar mutant: one with the same first base class.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from judging import MATRIX, NOT_RUN, results_of
from kvplug.errors import KvplugError
from kvplug_testing import waits
from kvplug_testing.contract import base
from kvplug_testing.contract.base import LEVELS

BREACHES = (AssertionError, KvplugError, pytest.fail.Exception)
"""Errors of a test that has caught a fault. A mutant's ``raises`` adds others; a test's own errors, such
as a callback's, count too.
"""
SUITES = Path(base.__file__).parent
MISTAKES = (AttributeError, NameError, ImportError, TypeError)
"""Errors of a mutant that no longer fits its base class."""

_before = results_of(MATRIX)
_caught: set[tuple[Any, str]] = set()
"""Each mutant with a law whose tests have caught it."""
_catching: set[tuple[Any, str]] = set()
"""Each mutant with the name of a test that has caught it."""
_hung: Counter[Any] = Counter()
"""How many tests of each mutant have failed after a wait."""
_dead: list[BaseException | None] = []
"""The errors of threads that have died in this test."""


@pytest.fixture(autouse=True, scope="module")
def _impatient(request: pytest.FixtureRequest) -> None:
    """Shorten the waits: a mutant that hangs never ends, and its leaks stay. A file may set patience_s."""
    waits.patience_s = getattr(request.module, "patience_s", 2.0)
    base.Contract.settle_s = 1.0


@pytest.fixture(autouse=True, scope="session")
def _listening() -> Iterator[None]:
    original = threading.excepthook

    def note(args: threading.ExceptHookArgs) -> None:
        _dead.append(args.exc_value)
        original(args)

    threading.excepthook = note
    yield
    threading.excepthook = original


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-test-to",
        choices=LEVELS,
        help="run the tests up to this level on mutants that are caught already",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest calls this hook for the tests of all folders.
    others = [item for item in items if not _is_mutants(item)]
    kept = [item for item in items if _is_mutants(item) and (_is_control(item) or _broken(item))]
    kept.sort(  # stable: other tests keep their order
        key=lambda item: (_is_control(item), item.cls.__name__, _level(item), _place(item))
    )
    for item in filter(_is_control, kept):
        # Sockets that failed tests of mutants have left open are closed now and then: no fault of a control.
        item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
    items[:] = others + kept


def _is_mutants(item: pytest.Item) -> bool:
    return item.path.parent == Path(__file__).parent


def _is_control(item: Any) -> bool:
    return getattr(item.cls, "is_control", False)


def _place(item: Any) -> int:
    """The sort key of a test among those that have caught the mutant before; the others come last."""
    result = _before.get(f"{item.path.stem}.{item.cls.__name__}", {"caught": {}})
    tests = [test for each in result["caught"].values() for test in each]
    return tests.index(item.originalname) if item.originalname in tests else len(tests)


def _broken(item: Any) -> set[tuple[Any, str]]:
    """The laws that the mutant breaks and this test checks."""
    return {(item.cls, id_) for id_ in {*item.cls.breaks} & {*item.get_closest_marker("kvplug_law").args}}


def _level(item: Any) -> int:
    """The sort key: tests of low levels run first, and others only for mutants that those do not catch."""
    return LEVELS.index(item.get_closest_marker("kvplug_law").kwargs["level"])


def _runs_anyway(item: Any) -> bool:
    """Whether a test runs on a mutant that is caught already."""
    # pytest does not know the option where it finds this file after it has read its command line.
    highest = item.config.getoption("every_test_to", None)
    return highest is not None and _level(item) <= LEVELS.index(highest)


def pytest_runtest_setup(item: Any) -> None:
    _dead.clear()
    if not _is_control(item):
        if _broken(item) <= _caught and not _runs_anyway(item):
            pytest.skip("caught already")
        if _hung[item.cls] >= 3:
            pytest.skip(NOT_RUN)
        return
    if not any(name == item.name and issubclass(cls, item.cls.__base__) for cls, name in _catching):
        pytest.skip("has caught nothing")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Report a mutant's failure that is not a breach as skipped. A control must not fail at all."""
    report = yield
    if report.failed and not _is_control(item):
        _hung[item.cls] += call.duration >= waits.patience_s
        if reason := _no_breach(item, call):
            path, line, _ = item.location
            report.outcome, report.longrepr = "skipped", (path, line, f"Skipped: no breach: {reason}")
        else:
            _caught.update(_broken(item))
            _catching.add((item.cls, item.name))
    return report


def _no_breach(item: Any, call: Any) -> str:
    """Why a failure does not count as a catch; empty if it does."""
    error = call.excinfo.value
    text: str = call.excinfo.exconly().partition("\n")[0]
    # Leaks are reported in the teardown, and break only ALL-7.
    if call.when != "call" and not (call.when == "teardown" and (item.cls, "ALL-7") in _broken(item)):
        return f"in {call.when}: {text}"
    breaches = (*BREACHES, *getattr(item.cls, "raises", ()))
    if not isinstance(error, breaches) and SUITES not in Path(call.excinfo.traceback[-1].path).parents:
        return text
    for each in (error, *_dead):
        for cause in _chain(each):
            if _is_mistake(cause):
                return f"{text}, because of {cause!r}"
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_mistake(error: BaseException) -> bool:
    """Whether the error, or a child's error in its text, is one of :data:`MISTAKES`."""
    if isinstance(error, MISTAKES) and not isinstance(error, KvplugError):
        return True
    begins = tuple(f"{mistake.__name__}: " for mistake in MISTAKES)
    return any(line.startswith(begins) for line in str(error).splitlines())
