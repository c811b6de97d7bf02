"""Every installed plugin is light: nothing heavy is imported until a name of its own is chosen."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

ENTRY_POINTS = sorted({entry.name for entry in entry_points(group="kvplug")})

LOOK = """
import sys
from kvplug import Registry
from kvplug.transport import Kind
registry = Registry.from_env()
(plugin,) = [plugin for plugin in registry.plugins if plugin.name == sys.argv[1]]
assert plugin.status == "ok", plugin.reason
for spec in plugin.specs:
    if hasattr(spec, "run_probe"):
        assert spec.run_probe().reason == "" or not spec.run_probe().viable
    if hasattr(spec, "load_options"):
        spec.load_options()
heavy = {"torch", "zmq", "numpy", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""

USE = """
import sys
from kvplug import Registry
(plugin,) = [plugin for plugin in Registry.from_env().plugins if plugin.name == sys.argv[1]]
for spec in plugin.specs:
    for load in ("load_factory", "load_worker_factory", "load"):
        if hasattr(spec, load):
            assert callable(getattr(spec, load)())
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ENTRY_POINTS)
@pytest.mark.parametrize("look", [pytest.param(LOOK, id="looked at"), pytest.param(USE, id="used")])
def test_a_plugin_keeps_what_its_specs_say(name: str, look: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", look, name], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_ours_are_installed() -> None:
    assert {"cpu", "lookup", "transformers"} <= set(ENTRY_POINTS)
