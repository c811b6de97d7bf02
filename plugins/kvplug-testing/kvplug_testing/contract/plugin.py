"""Judges a plugin as a whole: :func:`check_plugin` for a test, :class:`PluginContract` for a scorecard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import ClassVar

import attrs
import pytest

from kvplug.kit import discover
from kvplug_testing import plugin_inspector, waits
from kvplug_testing.contract.base import Contract, law
from kvplug_testing.laws import LAWS
from kvplug_testing.peers import end_of


@attrs.frozen
class Breach:
    """One violation of a law by a plugin."""

    law: str
    observed: str

    def __str__(self) -> str:
        return f"law {LAWS[self.law]}: {self.observed}"


@attrs.frozen
class Inspection:
    """What :mod:`kvplug_testing.plugin_inspector` has found."""

    breaches: tuple[Breach, ...]
    """By law."""
    unchecked: tuple[str, ...]
    """A sentence for each step that was skipped because a heavy library is not installed."""
    offers: bool
    """Whether everything that the plugin offers could be looked at."""


def check_plugin(name: str) -> tuple[str, ...]:
    """Check the installed plugin whose entry point is called ``name`` against the laws PLUGIN-1 to PLUGIN-4.

    Separate processes inspect it as ``kvplug list`` and a config do, so modules that the calling process has
    imported make no difference. No device is needed.

    Returns:
        What could not be checked here, and why: a sentence for each factory whose heavy library is not
        installed. Empty if everything was checked.

    Raises:
        AssertionError: the plugin breaks a law. The message lists all breaches, each with its law, the
            observation, followed by the text of these laws.
    """
    found = inspect_plugin(name, waits.patience_s)
    if found.breaches:
        lines = "".join(f"\n  - {breach}" for breach in found.breaches)
        laws = "\n".join(LAWS[id_].quoted for id_ in dict.fromkeys(breach.law for breach in found.breaches))
        raise AssertionError(f"the plugin {name!r} breaks laws:{lines}\n\n{laws}")
    return found.unchecked


def inspect_plugin(name: str, timeout_s: float) -> Inspection:
    """Inspect the plugin whose entry point is called ``name``, in two processes: the first loads what
    ``kvplug list`` loads, the second what is used.

    ``timeout_s`` is the time limit of each process, in seconds.
    """
    looked = _run("look", name, timeout_s)
    if not looked.offers:
        return looked
    used = _run("use", name, timeout_s)
    found = [*looked.breaches, *(each for each in used.breaches if each.law == "PLUGIN-3")]
    return Inspection(tuple(sorted(found, key=lambda each: each.law)), used.unchecked, offers=True)


def _run(mode: str, name: str, timeout_s: float) -> Inspection:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVPLUG_")}
    with tempfile.TemporaryDirectory(prefix="kvplug-") as folder:
        path = Path(folder, "facts")
        path.touch()
        command = [sys.executable, "-P", "-m", plugin_inspector.__name__, mode, name, str(path)]
        try:
            done = subprocess.run(command, env=environ, capture_output=True, timeout=timeout_s, check=False)
            printed = done.stderr.decode("utf-8", "replace").strip()
            ended = f"the process ended: {end_of(done.returncode)}{': ' if printed else ''}{printed[-2000:]}"
        except subprocess.TimeoutExpired:
            ended = f"it had not come to an end after {timeout_s:g} s"
        facts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [Breach(*fact["breach"]) for fact in facts if "breach" in fact]
    offers = mode == "use" or any("offers" in fact for fact in facts)
    if not any("end" in fact for fact in facts):
        step = next((fact["begins"] for fact in reversed(facts) if "begins" in fact), "")
        found.append(Breach("PLUGIN-3" if offers else "PLUGIN-1", f"{step}: {ended}" if step else ended))
        offers = False
    unchecked = tuple(fact["unchecked"] for fact in facts if "unchecked" in fact)
    return Inspection(tuple(sorted(found, key=lambda each: each.law)), unchecked, offers)


# -- the suite -------------------------------------------------------------------------------------


class PluginContract(Contract):
    """Checks a plugin against the laws PLUGIN, in a run that keeps a scorecard.

    ``pytest --kvplug-transport NAME`` also runs it for the plugin that offers NAME. In a plugin's own test
    file :func:`check_plugin` is enough.
    """

    plugin: ClassVar[str] = ""
    """The name of its entry point."""

    @classmethod
    def subject(cls) -> str:
        return f"plugin {cls.plugin}"

    @classmethod
    def distribution(cls) -> str:
        found = [each for each in discover() if each.name == cls.plugin]  # does not import the plugin
        return ", ".join(f"{each.distribution} {each.version}" for each in found)

    def _judge(self, law_: str) -> None:
        found = _inspected(self.plugin)
        observed = [breach.observed for breach in found.breaches if breach.law == law_]
        if observed:
            pytest.fail("; ".join(observed), pytrace=False)
        if not found.offers:
            pytest.skip(f"nothing that the plugin {self.plugin} offers could be loaded")
        if law_ == "PLUGIN-3" and found.unchecked:
            pytest.skip("; ".join(found.unchecked))

    @law("PLUGIN-1")
    def test_it_is_found_through_one_entry_point_and_loads_alone(self) -> None:
        self._judge("PLUGIN-1")

    @law("PLUGIN-2")
    def test_looking_at_it_loads_nothing_heavy_and_opens_no_device(self) -> None:
        self._judge("PLUGIN-2")

    @law("PLUGIN-3")
    def test_what_it_offers_is_what_its_specs_say(self) -> None:
        self._judge("PLUGIN-3")

    @law("PLUGIN-4")
    def test_what_it_offers_is_described(self) -> None:
        self._judge("PLUGIN-4")


@cache
def _inspected(name: str) -> Inspection:
    """The inspection, run once for all tests of a suite."""
    return inspect_plugin(name, waits.patience_s)
