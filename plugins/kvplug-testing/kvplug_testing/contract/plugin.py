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
    about: str
    """The topic of the test of :class:`PluginContract` that fails because of it."""
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
    """Whether anything that the plugin offers could be loaded."""


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
        raise AssertionError(f"the plugin {name!r} breaks {_counted(len(found.breaches))}:{lines}\n\n{laws}")
    return found.unchecked


def _counted(number: int) -> str:
    return "a law" if number == 1 else f"laws in {number} places"


def inspect_plugin(name: str, timeout_s: float) -> Inspection:
    """Inspect the plugin whose entry point is called ``name``, in two processes: the first loads what
    ``kvplug list`` loads, the second what is used.

    ``timeout_s`` is the time limit of each process, in seconds.
    """
    looked = _run("look", name, timeout_s)
    if not looked.offers or any(each.about == "whole" for each in looked.breaches):
        return looked
    used = _run("use", name, timeout_s)
    found = [*looked.breaches, *(each for each in used.breaches if each.about in ("factories", "whole"))]
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
        observed = f"{step}: {ended}" if step else ended
        where = ("PLUGIN-3", "whole") if offers else ("PLUGIN-1", "loads" if facts else "found")
        found.append(Breach(*where, observed))
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

    @property
    def is_loaded(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return "" if self._found.offers else f"nothing that the plugin {self.plugin} offers could be loaded"

    @property
    def _found(self) -> Inspection:
        return _inspected(self.plugin)

    def _none(self, *about: str) -> None:
        observed = [breach.observed for breach in self._found.breaches if breach.about in about]
        if observed:
            pytest.fail("; ".join(observed), pytrace=False)

    @law("PLUGIN-1")
    def test_it_is_found_through_one_entry_point(self) -> None:
        self._none("found")

    @law("PLUGIN-1")
    def test_it_states_its_api_as_a_literal_that_fits(self) -> None:
        self._none("api")

    @law("PLUGIN-1")
    def test_it_loads_while_all_others_are_blocked(self) -> None:
        self._none("loads")

    @law("PLUGIN-2", needs="is_loaded")
    def test_looking_at_it_loads_nothing_heavy(self) -> None:
        self._none("weight")

    @law("PLUGIN-2", needs="is_loaded")
    def test_looking_at_it_opens_no_device(self) -> None:
        self._none("devices")

    @law("PLUGIN-3", needs="is_loaded")
    def test_its_options_can_be_read(self) -> None:
        self._none("options")

    @law("PLUGIN-3", needs="is_loaded")
    def test_its_probes_answer(self) -> None:
        self._none("probe", "whole")

    @law("PLUGIN-3", needs="is_loaded")
    def test_capabilities_and_costs_are_stated(self) -> None:
        self._none("capabilities")

    @law("PLUGIN-3", needs="is_loaded")
    def test_its_factories_and_commands_are_there(self) -> None:
        self._none("factories")
        if reasons := "; ".join(self._found.unchecked):
            pytest.skip(reasons)

    @law("PLUGIN-4", needs="is_loaded")
    def test_everything_has_a_summary(self) -> None:
        self._none("summaries")

    @law("PLUGIN-4", needs="is_loaded")
    def test_every_option_has_a_help(self) -> None:
        self._none("help")

    @law("PLUGIN-4", needs="is_loaded")
    def test_its_readme_names_what_it_offers(self) -> None:
        self._none("readme")


@cache
def _inspected(name: str) -> Inspection:
    """The inspection, run once for all tests of a suite."""
    return inspect_plugin(name, waits.patience_s)
