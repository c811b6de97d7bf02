"""Each mutant is judged by the tests of the laws that it breaks, until one of them has caught it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplug.testing.contract import base

_caught: set[tuple[Any, str]] = set()
"""A mutant, and a law by whose tests it was caught."""


@pytest.fixture(autouse=True, scope="session")
def _impatient() -> None:
    """A mutant that hangs does so for ever, and what it has left stays."""
    base.patience_s = 2.0
    base.Contract.settle_s = 1.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # This file is read whenever the folder is seen.
    others = [item for item in items if not _is_mutants(item)]
    kept = [item for item in items if _is_mutants(item) and _broken(item)]
    kept.sort(key=lambda item: (item.cls.__name__, _level(item)))  # stable: else their order stays
    items[:] = others + kept


def _is_mutants(item: pytest.Item) -> bool:
    return item.path.parent == Path(__file__).parent


def _broken(item: Any) -> set[tuple[Any, str]]:
    """The laws that the mutant breaks and this test judges."""
    return {(item.cls, id_) for id_ in {*item.cls.breaks} & {*item.get_closest_marker("kvplug_law").args}}


def _level(item: Any) -> int:
    """What is quick comes first: the other levels are left to those that it does not catch."""
    return base.LEVELS.index(item.get_closest_marker("kvplug_law").kwargs["level"])


def pytest_runtest_setup(item: Any) -> None:
    if _broken(item) <= _caught:
        pytest.skip("caught already")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = yield
    if report.failed:
        _caught.update(_broken(item))
    return report
