"""Waivers: laws that a plugin does not keep yet, each with a reason, in its ``pyproject.toml``.

::

    [tool.kvplug.waivers]
    test_a_forked_child_finds_everything_closed = "the driver's handles cannot be closed after a fork"
    "TestRing::test_two_senders" = "one process may hold several rings; see issue 12"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvplug.errors import ConfigError

_KEY = ("tool", "kvplug", "waivers")


@attrs.frozen
class Waivers:
    """Of one file: by test name, or by ``Class::test``."""

    path: Path | None = None
    reasons: Mapping[str, str] = attrs.field(factory=dict)

    def reason(self, suite: str, test: str) -> str:
        """Why this test is waived; empty where it is not."""
        return self.reasons.get(f"{suite}::{test}") or self.reasons.get(test, "")


def waivers_for(folder: Path) -> Waivers:
    """Those of the nearest ``pyproject.toml`` at or above ``folder`` that is a package's (``[project]``).

    Raises:
        ConfigError: the table is not of names and reasons; every fault at once.
    """
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        if path.is_file():
            found = tomllib.loads(path.read_text(encoding="utf-8"))
            if "project" in found:
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
