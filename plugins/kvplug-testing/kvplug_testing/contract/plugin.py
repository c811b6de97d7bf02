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
def inspect_plugin(name: str) -> Inspection:
    """Inspect the plugin whose entry point is called ``name``, in a process of its own, once."""
    timeout_s = 2 * waits.patience_s
    unset = {key: "" for key in os.environ if key.startswith("KVPLUG_")}
    target = f"{plugin_inspector.__name__}:inspect"
    limit, last = time.monotonic() + timeout_s, plugin_inspector.ENTRY_POINT
    with peers.start(target, name, timeout_s=2 * timeout_s, env=unset, flags=["-P"]) as child:
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

    @pytest.mark.parametrize("id_", _LAWS)
    def test_it_keeps_the_law(self, id_: str) -> None:
        found = inspect_plugin(self.plugin)  # once for all laws
        if observed := [observed for broken, observed in found.breaches if broken == id_]:
            pytest.fail("; ".join(observed), pytrace=False)
        if not found.offers:
            pytest.skip(f"nothing that the plugin {self.plugin} offers could be loaded")
        if id_ == "PLUGIN-3" and found.unchecked:
            pytest.skip("; ".join(found.unchecked))
