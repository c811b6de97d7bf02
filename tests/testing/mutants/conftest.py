"""Each mutant is judged by the tests of the laws that it breaks, until one of them has caught it."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.testing.contract import base

_caught: set[Any] = set()


@pytest.fixture(autouse=True, scope="session")
def _impatient() -> None:
    """A mutant that hangs does so for ever."""
    base.patience_s = 2.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kept = [item for item in items if _breaks(item) & {*item.get_closest_marker("kvplug_law").args}]
    kept.sort(key=lambda item: item.cls.__name__)  # stable: the order of a mutant's tests stays
    items[:] = kept


def _breaks(item: Any) -> set[str]:
    return {*item.cls.breaks}


def pytest_runtest_setup(item: Any) -> None:
    if item.cls in _caught:
        pytest.skip("caught already")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = yield
    if report.failed:
        _caught.add(item.cls)
    return report
