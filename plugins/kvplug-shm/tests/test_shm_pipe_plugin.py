"""The plugin as a whole: found, light to load, what its specs say, and documented."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvplug.transport import Kind
from kvplug_testing import check_plugin


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("shm") == ()


def test_it_offers_the_pipe_by_strings_alone() -> None:
    from kvplug_shm import plugin

    (spec,) = [each for each in plugin.kvplug_transports() if each.kind is Kind.PIPE]
    assert spec.name == "shm"
    assert spec.load_options() is not None
    assert spec.load_factory().__name__ == "ShmEndpoint"


def test_describing_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvplug_shm import plugin; specs = plugin.kvplug_transports();"
        "[(spec.run_probe(), spec.load_options()) for spec in specs];"
        "print([n for n in ('torch', 'numpy', 'zmq', 'kvplug_shm.pipe.endpoint') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
