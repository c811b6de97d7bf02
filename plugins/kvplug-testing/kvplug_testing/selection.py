"""Which of the collected tests run, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from kvplug_testing.contract.base import LEVELS, Contract

_KIT = Contract.__module__.rpartition(".")[0]
"""The package with the parts of all suites."""


def selected_tests(
    items: Sequence[pytest.Item], level: str, laws: Collection[str]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that run, and those that do not. ``laws`` are the ids of the only laws that are judged; if it
    is empty, all are.

    Raises:
        pytest.UsageError: laws are given, and no test of any of them runs.
    """
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    above = set()
    for item in items:
        marker = item.get_closest_marker("kvplug_law")
        needed = LEVELS[0] if marker is None else marker.kwargs["level"]
        is_asked_for = not laws or (marker is not None and not {*laws}.isdisjoint(marker.args))
        is_kept = is_asked_for and LEVELS.index(needed) <= LEVELS.index(level)
        (kept if is_kept else left_out).append(item)
        if is_asked_for and not is_kept:
            above.add(needed)
    if laws and not kept:
        judged = {id_ for item in items for mark in item.iter_markers("kvplug_law") for id_ in mark.args}
        reason = f"no test here judges it; judged are {', '.join(sorted(judged)) or 'none'}"
        if above:
            reason = f"level {level} has no test of it, --kvplug-level {above.pop()} has"
        raise pytest.UsageError(f"--kvplug-law {', '.join(sorted(laws))}: {reason}")
    return kept, left_out


def put_in_order(items: list[pytest.Item]) -> None:
    """Sort the tests of each class, in place: simple laws come first.

    A suite is a class made of parts, and its bases name them in this order: what arrives, in what order, how
    things end, what is left behind. If a transport corrupts messages, the first failure then says so, and
    not that an object of a later test was left behind. pytest itself collects the last base first. Tests
    that an author has added come last.
    """
    places: dict[Any, list[int]] = {}
    for at, item in enumerate(items):
        if item.get_closest_marker("kvplug_law") is not None:
            places.setdefault(item.getparent(pytest.Class), []).append(at)
    for at_all in places.values():
        ordered = sorted((items[at] for at in at_all), key=_part)
        for at, item in zip(at_all, ordered, strict=True):
            items[at] = item


def _part(item: Any) -> int:
    """The position, among the bases of the item's class, of the one that first defined the test."""
    bases = item.cls.__mro__
    defining = [at for at, base in enumerate(bases) if item.originalname in vars(base)]
    if not defining or not bases[defining[-1]].__module__.startswith(f"{_KIT}."):
        return len(bases)
    return defining[-1]


def suite_of(item: pytest.Item) -> type[Contract]:
    """The suite of a test with a law.

    Raises:
        pytest.UsageError: it is in none.
    """
    suite = getattr(item, "cls", None)
    if not (isinstance(suite, type) and issubclass(suite, Contract)):
        raise pytest.UsageError(
            f"{item.nodeid} names a law and stands in no suite: put it into a class made from one, such as"
            " kvplug_testing.PipeContract, or from kvplug_testing.contract.base.Contract"
        )
    return suite
