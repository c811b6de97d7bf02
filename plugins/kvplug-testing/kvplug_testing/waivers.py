"""Waivers: laws that a plugin does not keep yet, each with a reason, in its ``pyproject.toml``.

::

    [tool.kvplug.waivers]
    test_a_forked_child_holds_none_of_the_descriptors = "the driver's cannot be closed after a fork"
    "TestRing::test_many_connect_at_once_over_one_contact" = "a ring takes one at a time; see issue 12"
    "test_a_tensor_of_each_dtype_arrives_with_its_bits[complex32]" = "the device has none"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvplug import ConfigError

_KEY = ("tool", "kvplug", "waivers")


@attrs.frozen
class Waivers:
    """The waivers of one file, by test name or by ``Class::test``; each with parameters or without, for all
    of them.
    """

    path: Path | None = None
    reasons: Mapping[str, str] = attrs.field(factory=dict)

    def reason(self, suite: str, test: str) -> str:
        """Why this test (its name with parameters) is waived; empty if it is not."""
        of_all = function_of(test)
        names = (f"{suite}::{test}", test, f"{suite}::{of_all}", of_all)
        return next((self.reasons[name] for name in names if name in self.reasons), "")


@attrs.frozen
class WaiverName:
    """The parts of one name in the table."""

    suite: str
    """Empty if the waiver applies to every class."""
    function: str
    test: str
    """The function, with its parameters if they are given."""

    @classmethod
    def parsed(cls, name: str) -> WaiverName:
        suite, _, function = function_of(name).rpartition("::")
        return cls(suite, function, name.removeprefix(f"{suite}::"))


def function_of(test: str) -> str:
    """A test's name without its parameters."""
    return test.partition("[")[0]


def waivers_for(folder: Path) -> Waivers:
    """The waivers of the nearest ``pyproject.toml`` at or above ``folder`` that has a table ``[project]`` or
    ``[tool.kvplug]``.

    Raises:
        ConfigError: the file cannot be read, or the table has an entry that is not a name with a reason;
            lists every fault.
    """
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        if path.is_file():
            try:
                found = tomllib.loads(path.read_text(encoding="utf-8"))
            except (ValueError, OSError) as e:
                raise ConfigError(f"it cannot be read: {e}", source=str(path)) from e
            tools = found.get("tool")
            if "project" in found or (isinstance(tools, dict) and "kvplug" in tools):
                return _checked(path, found)
    return Waivers()


def _checked(path: Path, found: object) -> Waivers:
    for key in _KEY:
        found = found.get(key, {}) if isinstance(found, dict) else found
    if not isinstance(found, dict):
        raise ConfigError("tool.kvplug.waivers must be a table: test name = reason", source=str(path))
    faults = [
        f"tool.kvplug.waivers: {test!r} needs a reason in words"
        for test, reason in found.items()
        if not (isinstance(reason, str) and reason.strip())
    ]
    if faults:
        raise ConfigError(*faults, source=str(path))
    return Waivers(path, found)
