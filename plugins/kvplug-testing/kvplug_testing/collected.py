"""The collected tests, to check the names in waivers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from kvplug.kit import did_you_mean
from kvplug_testing.contract import suites
from kvplug_testing.waivers import WaiverName, Waivers, function_of


class Collected:
    """All tests that pytest has collected, before a level, ``-k`` or ``-m`` deselects any.

    The command line may name one file of several, or one test of a class. A waiver of a test that is not
    collected is reported as wrong only after the test is looked up in the other files.
    """

    def __init__(self, config: pytest.Config, items: Iterable[pytest.Item]) -> None:
        self._config = config
        self._narrowed = config.args_source is pytest.Config.ArgsSource.ARGS or bool(suites.chosen)
        self._classes: dict[str, list[pytest.Class]] = {}
        for item in items:
            found = item.getparent(pytest.Class)
            nodes = self._classes.setdefault(found.obj.__name__, []) if found is not None else []
            if found is not None and found not in nodes:
                nodes.append(found)
        self._tests = {item.name for item in items}

    def faults(self, waivers: Waivers) -> list[str]:
        """For each waiver that names no test of the kit: its name, and what does not exist."""
        given = [(name, self._fault(WaiverName.parsed(name), waivers.path)) for name in waivers.reasons]
        return [f"{name} ({fault})" for name, fault in given if fault]

    def _fault(self, name: WaiverName, path: Path | None) -> str:
        known = self._classes.get(name.suite, []) if name.suite else self._every
        if name.suite and not known:
            if self._narrowed or self._is_elsewhere(name.suite, path):
                return ""
            return f"there is no class {name.suite}{did_you_mean(name.suite, self._classes)}"
        whole = bool(name.suite and not self._narrowed)  # otherwise another class or file may have it
        functions = {each for node in known for each in dir(node.obj)}
        if not whole:
            functions |= {each for suite in suites.every() for each in dir(suite)}
        if name.function not in functions and (whole or not self._is_written(name.function, path)):
            tests = [each for each in functions if each.startswith("test")]
            return f"there is no test {name.function}{did_you_mean(name.function, tests)}"
        if name.test == name.function or (not name.suite and name.test in self._tests):
            return ""
        if not whole and self._is_of_others(name.function):
            return ""
        tests = [test for node in known for test in _tests_of(node) if function_of(test) == name.function]
        if not tests or name.test in tests:  # a suite that is not collected may have it
            return ""
        return f"it has no such parameters{did_you_mean(name.test, tests)}"

    def _is_of_others(self, function: str) -> bool:
        """Whether a suite without a collected class has the test too, perhaps with other parameters."""
        collected = [node.obj for node in self._every]
        return any(
            hasattr(suite, function)
            for suite in suites.every()
            if not any(issubclass(cls, suite) for cls in collected)
        )

    @property
    def _every(self) -> list[pytest.Class]:
        return [node for nodes in self._classes.values() for node in nodes]

    def _is_elsewhere(self, suite: str, path: Path | None) -> bool:
        """Whether a class that is not collected is in another file, or generated for another name."""
        return suite in suites.made_names() or self._is_written(suite, path)

    def _is_written(self, name: str, path: Path | None) -> bool:
        """Whether any file of the package contains the word."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        return path is not None and any(word.search(_text(each)) for each in self._sources(path.parent))

    def _sources(self, folder: Path) -> Iterator[Path]:
        """The Python files of a package, where pytest would look for them."""
        left_out = ["__pycache__", *self._config.getini("norecursedirs")]
        for place, folders, files in os.walk(folder):
            folders[:] = [
                each
                for each in folders
                if not any(fnmatch(each, pattern) for pattern in left_out)
                and not Path(place, each, "pyvenv.cfg").exists()
            ]
            yield from (Path(place, each) for each in files if each.endswith(".py"))


def _tests_of(node: pytest.Class) -> list[str]:
    """All tests of a class, including those that are not collected."""
    fresh: Any = type(node).from_parent(node.parent, name=node.name)
    return [each.name for each in fresh.collect()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
