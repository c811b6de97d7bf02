"""Judges a plugin as a whole: :func:`check_plugin` for a test, :class:`PluginContract` for a scorecard."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import ClassVar

import attrs
import pytest

from kvplug import PeerGoneError, TimeoutError
from kvplug_testing import peers, plugin_inspector, waits
from kvplug_testing.contract.base import Contract
from kvplug_testing.laws import LAWS

_LAWS = [
    pytest.param(id_, marks=pytest.mark.kvplug_law(id_, level="quick", needs=""))
    for id_ in LAWS
    if id_.startswith("PLUGIN-")
]


@attrs.frozen
class Inspection:
    """What :mod:`kvplug_testing.plugin_inspector` has found."""

    breaches: tuple[tuple[str, str], ...]
    """A law and an observation each, by law."""
    unchecked: tuple[str, ...]
    """A sentence for each step that was skipped because a heavy library is not installed."""
    offers: bool
    """Whether everything that the plugin offers could be looked at."""


def check_plugin(name: str) -> tuple[str, ...]:
    """Check the installed plugin whose entry point is called ``name`` against the laws PLUGIN-1 to PLUGIN-4.

    A process of its own inspects it as ``kvplug list`` and a config do, so modules that the calling process
    has imported make no difference. No device is needed.

    Returns:
        What could not be checked here, and why: a sentence for each factory whose heavy library is not
        installed. Empty if everything was checked.

    Raises:
        AssertionError: the plugin breaks a law. The message lists all breaches, each with its law, the
            observation, followed by the text of these laws.
    """
    found = inspect_plugin(name)
    if found.breaches:
        lines = "".join(f"\n  - law {LAWS[id_]}: {observed}" for id_, observed in found.breaches)
        quoted = "\n".join(LAWS[id_].quoted for id_ in dict.fromkeys(id_ for id_, _ in found.breaches))
        raise AssertionError(f"the plugin {name!r} breaks laws:{lines}\n\n{quoted}")
    return found.unchecked


@cache
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
            while step := child.recv(max(0.0, limit - time.monotonic())):
                last = step
            breaches, unchecked, offers = child.result()
            return Inspection(tuple((id_, observed) for id_, observed in breaches), tuple(unchecked), offers)
        except TimeoutError:
            ended = f"it had not come to an end after {timeout_s:g} s"
        except PeerGoneError:
            wrote = child.stderr.strip()[-2000:]
            ended = f"the process ended: {peers.end_of(child.wait())}{wrote and f'; it wrote: {wrote}'}"
    id_ = "PLUGIN-1" if last.startswith(plugin_inspector.ENTRY_POINT) else "PLUGIN-3"
    return Inspection(((id_, f"{last}: {ended}"),), (), offers=False)


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
        found = inspect_plugin(self.plugin, waits.patience_s)  # once for all tests
        observed = [breach.observed for breach in found.breaches if breach.law == law_]
        if observed:
            pytest.fail("; ".join(observed), pytrace=False)
        if not found.offers:
            pytest.skip(f"nothing that the plugin {self.plugin} offers could be loaded")
        if id_ == "PLUGIN-3" and found.unchecked:
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
